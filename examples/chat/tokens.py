"""The tokens of conversations, and which of them are the assistant's: tokenizers, chat templates, masks."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from examples.chat.conversations import Conversation
from holdfast.errors import RecipeError

# The template that comes with Holdfast, and the one that a model folder's tokenizer has.
QWEN, OWN = "qwen2.5", "own"
# In order: the padding and the end of a text, the beginning of a turn, the end of a turn.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Marks that a template writes into a conversation, in the spellings of Qwen, Llama, DeepSeek and Gemma: each has to be
# one token.
MARK = re.compile(r"<\|[^|<>]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<(?:start|end)_of_turn>")
# The marks of the text to learn, as transformers finds them.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TOKEN_NAME = re.compile(r"\b(?:bos|eos|pad|unk|sep|cls)_token\b")


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with `SPECIAL_TOKENS`, trained on texts. Equal texts give an equal tokenizer.

    Args:
        size: the number of tokens.

    Raises:
        RecipeError: the bytes and the special tokens are more than ``size``.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + len(SPECIAL_TOKENS):
        raise RecipeError(f"settings.vocab_size = {size}: expected at least {len(alphabet) + len(SPECIAL_TOKENS)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*SPECIAL_TOKENS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_of_turn, pad_token=end_of_text)


def load_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model folder.

    Raises:
        RecipeError: the folder doesn't exist, or has no tokenizer with a fast implementation.
    """
    if not Path(folder).is_dir():
        raise RecipeError(
            f"settings.model = {folder!r}: expected a folder of this machine, because nothing is downloaded",
            hint="hf download NAME --local-dir FOLDER, and name that folder",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(f"settings.model = {folder!r}: its tokenizer can't be loaded: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise RecipeError(
            f"settings.model = {folder!r}: {type(tokenizer).__name__} is no fast tokenizer",
            hint="the folder needs a tokenizer.json",
        )
    return tokenizer


def read_template(name: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a chat template that marks the answers and suits a tokenizer.

    Args:
        name: `QWEN`, `OWN`, or the path of a Jinja file.

    Raises:
        RecipeError: there is no such template, it has no generation marks, or the tokenizer lacks one of its tokens.
    """
    template = _find_template(name, tokenizer)
    if not GENERATION.search(template):
        raise RecipeError(
            f"settings.template = {name!r}: the chat template doesn't mark the answers, so nothing would be learned",
            hint="write {% generation %} before an answer and {% endgeneration %} after it and the token that ends it"
            f", or take the template of Qwen2.5 that has them: template = {QWEN!r}",
        )
    for token in sorted({*MARK.findall(template)}):
        if len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1:
            raise RecipeError(
                f"settings.template = {name!r} writes {token}, which is no token of the tokenizer",
                hint="take a template that was made for this model, or add the token to its tokenizer",
            )
    for token_name in sorted({*TOKEN_NAME.findall(template)}):
        if getattr(tokenizer, token_name) is None:
            raise RecipeError(
                f"settings.template = {name!r} writes {token_name}, which the tokenizer doesn't have",
                hint="take a template that was made for this model, or set the token in its tokenizer_config.json",
            )
    return template


def _find_template(name: str, tokenizer: PreTrainedTokenizerFast) -> str:
    if name == OWN:
        if not isinstance(own := tokenizer.chat_template, str):
            raise RecipeError(f"settings.template = {OWN!r}: the tokenizer has no chat template of its own")
        return own
    path = Path(__file__).with_name("chat_template.jinja") if name == QWEN else Path(name)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(
            f"settings.template = {name!r} can't be read: {error}", hint=f"expected {QWEN!r}, {OWN!r} or a path"
        ) from error


def encode(
    conversation: Conversation, template: str, tokenizer: PreTrainedTokenizerFast, max_length: int
) -> tuple[list[int], list[bool]]:
    """Return a conversation's tokens, and for each token whether it is the assistant's.

    The text is cut where an answer begins and where it ends, and each piece is tokenized alone, as it is when a model
    answers. So no token crosses a cut: a line end before an answer and the answer's first line end stay two tokens.

    Args:
        max_length: the largest number of tokens; further ones are cut off.

    Raises:
        RecipeError: the template doesn't take the conversation, or a message has one of its marks.
    """
    for message in conversation.messages:
        if marks := {*MARK.findall(template)} & {*MARK.findall(message["content"])}:
            raise RecipeError(f"{conversation.place}: a message has {min(marks)}, which begins or ends a turn")
    text, spans = render(conversation, template, tokenizer)
    cuts = [0, *(cut for span in spans for cut in span), len(text)]
    pieces = tokenizer([text[start:stop] for start, stop in pairwise(cuts)], add_special_tokens=False)["input_ids"]
    tokens = [token for piece in pieces for token in piece]
    is_answer = [number % 2 == 1 for number, piece in enumerate(pieces) for _ in piece]  # every second piece
    return tokens[:max_length], is_answer[:max_length]


def render(
    conversation: Conversation, template: str, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, Sequence[tuple[int, int]]]:
    """Return a conversation as text, and the start and the end of each answer in it.

    Raises:
        RecipeError: the template doesn't take the conversation, or doesn't mark its answers.
    """
    try:
        texts, spans = render_jinja_template(
            [conversation.messages], chat_template=template, return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )  # fmt: skip
    except TemplateError as error:
        raise RecipeError(f"{conversation.place}: the chat template refuses the conversation: {error}") from error
    answers = sum(message["role"] == "assistant" for message in conversation.messages)
    if len(spans[0]) != answers:
        raise RecipeError(
            f"{conversation.place}: the chat template marks {len(spans[0])} of {answers} answers",
            hint="{% generation %} has to stand in the branch of every message of the assistant",
        )
    return texts[0], spans[0]


def hash_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 of a tokenizer's vocabulary, rules and special tokens."""
    special = sorted(tokenizer.special_tokens_map.items())
    return hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()}{special}".encode()).hexdigest()
