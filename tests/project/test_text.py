"""Tests that no file of the project reads or writes text in the machine's locale."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

ROOMS = ("holdfast", "tasks", "flows", "deployments", "examples")
# The number of arguments before the encoding, by the call's name.
BEFORE = {".read_text": 0, ".write_text": 1}
PROCESSES = {".run", ".Popen", ".check_output"}
OPENS = {"open", ".open", ".fdopen"}


def find_texts_by_locale(source: str) -> Iterator[int]:
    """Yield the lines of calls that read or write text in the locale's encoding."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        name = f".{call.func.attr}" if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if "encoding" not in keywords and is_text(name, call.args, keywords):
            yield call.lineno


def is_text(name: str, arguments: list[ast.expr], keywords: dict[str | None, ast.expr]) -> bool:
    """Return whether a call of this name handles text without passing its encoding by position."""
    if name in BEFORE:
        return len(arguments) <= BEFORE[name]
    if name in PROCESSES:
        return bool({"text", "universal_newlines"} & keywords.keys())
    values = [each.value for each in [*arguments, keywords.get("mode")] if isinstance(each, ast.Constant)]
    modes = [value for value in values if isinstance(value, str) and set(value) <= set("rwaxbt+")]
    if name == ".open" and not modes:  # other classes have a method of this name too
        return False
    return name in OPENS and "b" not in "".join(modes)


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.read_text(errors='replace')", True),
        ("path.write_text(text)", True),
        ("path.write_text(text, 'utf-8')", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.Popen(command, encoding='utf-8')", False),
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("path.open('a')", True),
        ("attempt.open()", False),
        ("os.fdopen(1, 'w')", True),
        ("os.fdopen(1, 'wb')", False),
    ],
)
def test_calls_without_an_encoding_are_found(source: str, is_found: bool) -> None:
    assert bool(list(find_texts_by_locale(source))) == is_found


@pytest.mark.parametrize("room", ROOMS)
def test_every_call_for_text_names_its_encoding(room: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / room).rglob("*.py")
        for line in find_texts_by_locale(path.read_text("utf-8"))
    }
    assert not found
