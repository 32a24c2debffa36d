"""Conversations from files and from the standard library."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.chat.conversations import SYSTEM, Conversation, read_conversations
from holdfast.errors import RecipeError

ASK = {"role": "user", "content": "how?"}
ANSWER = {"role": "assistant", "content": "so"}


def line(*messages: Any, **fields: Any) -> str:
    return json.dumps({"messages": messages, **fields})


def write(folder: Path, *lines: str, name: str = "talk.jsonl") -> str:
    (folder / name).write_text("\n".join(lines), "utf-8")
    return str(folder / name)


def test_each_line_is_a_conversation(tmp_path: Path) -> None:
    path = write(tmp_path, line(ASK, ANSWER, id=7), "", line(ANSWER | {"name": "a"}))
    assert read_conversations(path) == [
        Conversation([ASK, ANSWER], f"{path}:1"),
        Conversation([ANSWER], f"{path}:3"),
    ]


def test_a_line_ends_only_where_json_says_so(tmp_path: Path) -> None:
    """U+2028 and U+0085 end a line of text in Python, and may stand in a JSON string."""
    answer = {"role": "assistant", "content": "a\u2028b\x85c"}
    path = write(tmp_path, json.dumps({"messages": [answer]}, ensure_ascii=False), line(ANSWER))
    assert [each.messages for each in read_conversations(path)] == [[answer], [ANSWER]]


def test_a_glob_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, content in (("b", "second"), ("a", "first")):
        write(tmp_path, line(ANSWER | {"content": content}), name=f"{name}.jsonl")
    found = read_conversations(f"{tmp_path}/*.jsonl")
    assert [each.messages[0]["content"] for each in found] == ["first", "second"]
    assert len(read_conversations(f"{tmp_path}/*.jsonl", limit=1)) == 1


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ('{"messages": [', "expected a line of JSON"),
        ("\udcff", "expected a line of JSON"),
        ("[]", "expected an object with a list of messages"),
        ('{"messages": []}', "expected an object with a list of messages"),
        ('{"prompt": "how?", "completion": "so"}', "expected an object with a list of messages"),
        (line(ASK, "so"), "message 2 has the role None"),
        (line(ASK, {"role": "tool", "content": "so"}), "message 2 has the role 'tool', expected one of system, user"),
        (line(ASK, {"role": "assistant", "content": None}), "message 2 has the content None, expected text"),
        (line(ASK), "no message of the assistant"),
    ],
)
def test_a_broken_line_is_named_with_its_number(tmp_path: Path, broken: str, said: str) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_bytes("\n".join([line(ASK, ANSWER), broken, line(ANSWER)]).encode(errors="surrogateescape"))
    with pytest.raises(RecipeError) as caught:
        read_conversations(str(path))
    assert caught.value.message.startswith(f"{path}:2: ")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_the_standard_library_answers_questions_about_itself() -> None:
    found = read_conversations("stdlib", limit=100)
    assert len(found) == 100
    assert read_conversations("stdlib", limit=100) == found
    answers = [each.messages[2]["content"] for each in found]
    assert len({*answers}) == 100
    assert all("\n\n" not in answer and answer == answer.strip() for answer in answers)
    for each in found:
        assert [message["role"] for message in each.messages] == ["system", "user", "assistant"]
        assert each.messages[0]["content"] == SYSTEM
        assert "._" not in each.messages[1]["content"].partition("(")[0]
