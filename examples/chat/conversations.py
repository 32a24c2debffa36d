"""Conversations to learn from: lines of JSON, or questions about the Python standard library and its own answers."""

import ast
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.errors import RecipeError
from holdfast.recipes.texts import STANDARD_LIBRARY, find_standard_library, list_standard_library, read_files

ROLES = ("system", "user", "assistant")
SYSTEM = "You explain Python's standard library."
SHAPE = 'a line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
        messages: the conversation's turns, each with ``role`` and ``content``.
        place: the file and the line from which the conversation comes.
    """

    messages: Sequence[dict[str, str]]
    place: str


def read_conversations(data: str, limit: int | None = None) -> list[Conversation]:
    """Return the conversations of the standard library or of files.

    Args:
        data: ``stdlib``, or an fsspec URL or glob of files whose lines are JSON: `SHAPE`.
        limit: the largest number of conversations; None for all.

    Raises:
        RecipeError: there is no file, or a line is no conversation; the message names the line.
    """
    found = explain_standard_library() if data == STANDARD_LIBRARY else parse_files(data)
    return list(islice(found, limit))


def parse_files(data: str) -> Iterator[Conversation]:
    """Yield the conversation of each line that isn't blank."""
    for path, content in read_files(data):
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                yield parse_line(line, f"{path}:{number}")


def parse_line(line: bytes, place: str) -> Conversation:
    """Return the conversation of a line of JSON.

    Raises:
        RecipeError: the line is no JSON, or no conversation with an answer.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RecipeError(f"{place}: expected a line of JSON: {error}", hint=SHAPE) from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise RecipeError(f"{place}: expected an object with a list of messages", hint=SHAPE)
    turns = [_check_message(message, number, place) for number, message in enumerate(messages, 1)]
    if not any(turn["role"] == "assistant" for turn in turns):
        raise RecipeError(f"{place}: the conversation has no message of the assistant to learn from", hint=SHAPE)
    return Conversation(turns, place)


def _check_message(message: Any, number: int, place: str) -> dict[str, str]:
    role, content = (message.get(name) if isinstance(message, dict) else None for name in ("role", "content"))
    if role not in ROLES:
        raise RecipeError(f"{place}: message {number} has the role {role!r}, expected one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise RecipeError(f"{place}: message {number} has the content {content!r}, expected text")
    return {"role": role, "content": content}


def explain_standard_library() -> Iterator[Conversation]:
    """Yield a question about each public class and function of the standard library that has a docstring.

    The answer is the docstring's first paragraph. A repeated answer is left out, because it might be both in the text
    that is learned and in the text that is held out.
    """
    root, answers = find_standard_library(), set()
    for name in list_standard_library():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        with warnings.catch_warnings(action="ignore"):  # ignore warnings about old escapes in the library's strings
            tree = ast.parse((root / name).read_bytes())
        for definition, path in _list_public(tree, module):
            answer = (ast.get_docstring(definition) or "").partition("\n\n")[0].strip()
            if answer and answer not in answers:
                answers.add(answer)
                yield Conversation(
                    [
                        {"role": "system", "content": SYSTEM},
                        {"role": "user", "content": f"What is {path}{_describe_arguments(definition)}?"},
                        {"role": "assistant", "content": answer},
                    ],
                    f"{root / name}:{definition.lineno}",
                )


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _list_public(scope: ast.AST, path: str) -> Iterator[tuple[Definition, str]]:
    """Yield a module's public functions and classes, and these classes' public members, with their dotted names."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node, f"{path}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from _list_public(node, f"{path}.{node.name}")


def _describe_arguments(definition: Definition) -> str:
    return "" if isinstance(definition, ast.ClassDef) else f"({ast.unparse(definition.args)})"
