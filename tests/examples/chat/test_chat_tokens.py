"""The tokens of conversations: which are learned, to the letter, and which templates and tokenizers are refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import trl
from transformers import PreTrainedTokenizerFast

from examples.chat.conversations import Conversation
from examples.chat.tokens import (
    encode,
    hash_tokenizer,
    load_tokenizer,
    read_template,
    render,
    train_tokenizer,
)
from holdfast.errors import RecipeError

pytestmark = [pytest.mark.slow, pytest.mark.extras]  # importing transformers takes seconds

TEXTS = ["how do I read a file? open(path).read()", "what is a list? a row of values", "ok ok ok"] * 20
DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 290)


@pytest.fixture(scope="module")
def template(tokenizer: PreTrainedTokenizerFast) -> str:
    return read_template("qwen2.5", tokenizer)


def talk(*turns: tuple[str, str]) -> Conversation:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Conversation([{"role": roles[role], "content": content} for role, content in turns], "talk.jsonl:1")


CONVERSATIONS = {
    "one turn": talk(("u", "how?"), ("a", "so")),
    "a system turn": talk(("s", "be short"), ("u", "how?"), ("a", "so")),
    "a later system turn": talk(("u", "how?"), ("a", "so"), ("s", "be long"), ("u", "how?"), ("a", "so and so")),
    "several turns": talk(("u", "a"), ("a", "b"), ("u", "c"), ("a", "d"), ("u", "e"), ("a", "f")),
    "a question at the end": talk(("u", "a"), ("a", "b"), ("u", "c")),
    "two answers in a row": talk(("u", "a"), ("a", "b"), ("a", "c")),
    "an empty answer": talk(("u", "how?"), ("a", "")),
    "only empty turns": talk(("s", ""), ("u", ""), ("a", "")),
    "unicode": talk(
        ("u", "schön? 你好 👩\u200d👩\u200d👧"), ("a", "größer 你好 e\u0301 👩\u200d👩\u200d👧 \u2028 \x00")
    ),
    "line ends and spaces at the ends": talk(("u", "\n how? \n"), ("a", "\n\n so \n ")),
    "the template's own words": talk(("u", "assistant\nuser"), ("a", "system\nassistant {% generation %} {{ x }}")),
}


def show(tokenizer: PreTrainedTokenizerFast, tokens: list[int], is_answer: list[bool]) -> str:
    """Return tokens as text, with each run of learned ones in square brackets."""
    runs = itertools.groupby(zip(tokens, is_answer, strict=True), key=lambda each: each[1])
    texts = ((is_learned, tokenizer.decode([token for token, _ in run])) for is_learned, run in runs)
    return "".join(f"[{text}]" if is_learned else text for is_learned, text in texts)


def write_out(conversation: Conversation) -> str:
    """Return the text that Qwen2.5 is given for a conversation, with the learned parts in square brackets."""
    text = "" if conversation.messages[0]["role"] == "system" else f"<|im_start|>system\n{DEFAULT}<|im_end|>\n"
    for message in conversation.messages:
        is_answer = message["role"] == "assistant"
        content = f"[{message['content']}<|im_end|>]" if is_answer else f"{message['content']}<|im_end|>"
        text += f"<|im_start|>{message['role']}\n{content}\n"
    return text


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_answers_and_their_ends_are_learned_to_the_letter(
    tokenizer: PreTrainedTokenizerFast, template: str, name: str
) -> None:
    found = encode(CONVERSATIONS[name], template, tokenizer, 10_000)
    assert show(tokenizer, *found) == write_out(CONVERSATIONS[name])


def test_an_example_written_out(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    conversation = talk(("s", "be short"), ("u", "how?"), ("a", "so"), ("u", "why?"), ("a", ""))
    assert show(tokenizer, *encode(conversation, template, tokenizer, 10_000)) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhow?<|im_end|>\n"
        "<|im_start|>assistant\n[so<|im_end|>]\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n[<|im_end|>]\n"
    )


def test_a_conversation_that_is_too_long_is_cut_wherever_its_length_ends(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    """So the last answer may be cut: its first tokens are learned, and no end of the turn."""
    tokens, is_answer = encode(CONVERSATIONS["several turns"], template, tokenizer, 10_000)
    for length in range(1, len(tokens) + 1):
        cut = encode(CONVERSATIONS["several turns"], template, tokenizer, length)
        assert cut == (tokens[:length], is_answer[:length])
    whole = write_out(talk(("u", "how?"), ("a", "open a file")))
    length = len(encode(talk(("u", "how?"), ("a", "open")), template, tokenizer, 10_000)[0]) - 2
    cut = encode(talk(("u", "how?"), ("a", "open a file")), template, tokenizer, length)
    assert show(tokenizer, *cut) == whole.partition(" a file")[0] + "]"


def test_the_template_is_that_of_qwen(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    """TRL has a copy of the original, without marks."""
    original = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text("utf-8")
    tokens: Any = tokenizer
    for conversation in CONVERSATIONS.values():
        for begins_answer in (False, True):
            texts = [
                tokens.apply_chat_template(
                    conversation.messages, chat_template=each, tokenize=False, add_generation_prompt=begins_answer
                )
                for each in (original, template)
            ]
            assert texts[0] == texts[1]


def test_a_prompt_has_the_tokens_that_come_before_an_answer(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    """A tokenizer with a token for two line ends would otherwise begin the answer in the middle of one."""
    asked, answered = talk(("u", "how?")), talk(("u", "how?"), ("a", "\n\nso"))
    tokens: Any = tokenizer
    prompt = tokens.apply_chat_template(
        asked.messages, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    found, is_answer = encode(answered, template, tokenizer, 10_000)
    assert found[: len(prompt)] == prompt
    assert is_answer.index(True) == len(prompt)


# ---- refused


def test_a_template_without_marks_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    unmarked = tmp_path / "plain.jinja"
    unmarked.write_text("{% for message in messages %}{{ message.content }}{% endfor %}", "utf-8")
    with pytest.raises(RecipeError, match="doesn't mark the answers, so nothing would be learned") as caught:
        read_template(str(unmarked), tokenizer)
    assert "{% generation %}" in caught.value.hint


def test_a_template_that_marks_only_some_answers_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for message in messages %}{% if loop.last and message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RecipeError, match=r"talk\.jsonl:1: the chat template marks 1 of 3 answers"):
        encode(CONVERSATIONS["several turns"], template, tokenizer, 100)


def test_a_template_that_raises_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ raise_exception('roles must alternate') }}{% generation %}{% endgeneration %}"
    with pytest.raises(RecipeError, match=r"talk\.jsonl:1: the chat template refuses .* roles must alternate"):
        render(CONVERSATIONS["one turn"], template, tokenizer)


def test_a_template_that_is_no_jinja_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "broken.jinja").write_text("{% generation %}{{ message.content }", "utf-8")
    template = read_template(str(tmp_path / "broken.jinja"), tokenizer)
    with pytest.raises(RecipeError, match=r"talk\.jsonl:1: the chat template refuses"):
        render(CONVERSATIONS["one turn"], template, tokenizer)


@pytest.mark.parametrize("name", ["nowhere.jinja", "own"])
def test_a_template_that_is_not_there_is_named(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(RecipeError, match=f"settings.template = '{name}'"):
        read_template(name, tokenizer)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("<|start_header_id|>", "writes <|start_header_id|>, which is no token"),
        ("<\uff5cUser\uff5c>", "writes <\uff5cUser\uff5c>, which is no token"),
        ("<start_of_turn>", "writes <start_of_turn>, which is no token"),
        ("{{ bos_token }}", "writes bos_token, which the tokenizer doesn't have"),
    ],
)
def test_a_special_token_that_the_tokenizer_lacks_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, written: str, said: str
) -> None:
    path = tmp_path / "other.jinja"
    path.write_text(f"{written}{{% generation %}}{{{{ messages[0].content }}}}{{% endgeneration %}}", "utf-8")
    with pytest.raises(RecipeError) as caught:
        read_template(str(path), tokenizer)
    assert said in caught.value.message


def test_a_tokenizer_without_the_marks_of_the_template_is_refused(tmp_path: Path) -> None:
    plain = train_tokenizer(TEXTS, 290)
    backend = json.loads(plain.backend_tokenizer.to_str())
    backend["added_tokens"] = [each for each in backend["added_tokens"] if each["content"] == "<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend), "utf-8")
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    with pytest.raises(RecipeError, match=r"writes <\|im_end\|>, which is no token of the tokenizer"):
        read_template("qwen2.5", loaded)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_that_ends_its_own_turn_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: str, role: str
) -> None:
    messages = [{"role": "user", "content": "how?"}, {"role": "assistant", "content": "so"}]
    messages[role == "assistant"]["content"] += "<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(RecipeError, match=r"talk.jsonl:9: a message has <\|im_end\|>"):
        encode(Conversation(messages, "talk.jsonl:9"), template, tokenizer, 100)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="its tokenizer can't be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(RecipeError, match="nothing is downloaded"):
        load_tokenizer("Qwen/Qwen2.5-0.5B")


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"vocab_size = 258: expected at least 259"):
        train_tokenizer(TEXTS, 258)


# ---- the fingerprint


def test_a_saved_tokenizer_is_the_same_and_another_is_not(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert hash_tokenizer(load_tokenizer(str(tmp_path))) == hash_tokenizer(tokenizer)
    assert hash_tokenizer(train_tokenizer(TEXTS, 290)) == hash_tokenizer(tokenizer)
    assert hash_tokenizer(train_tokenizer(TEXTS, 289)) != hash_tokenizer(tokenizer)
    assert hash_tokenizer(train_tokenizer([*TEXTS, "otherwise " * 99], 290)) != hash_tokenizer(tokenizer)
