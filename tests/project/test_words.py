"""One word per thing: names in the code that would be a second word for it, or one word for two things, are refused."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = ("holdfast", "tasks", "flows", "deployments")
# The words for things that have another word already.
INSTEAD_OF = {"why": "reason", "checkpoint_dir": "folder", "ckpt": "checkpoint"}
# A run is its name, or the `Run` that a loop takes; a folder on the store, a training and a flow run have words of
# their own.
RUN_IS = ("str", "Annotated[str", "Run", "'Run'")
# Their fields are keys on disk or of a command's JSON, which stay as they are.
KEYS = {"holdfast/journal/records.py", "holdfast/machine/contract.py"}


def find_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def find_names(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield the names that code gives: each with its annotation (empty for none) and line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, ast.unparse(node.annotation) if node.annotation else "", node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation), node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, "", node.lineno
        elif isinstance(node, ast.FunctionDef):
            yield node.name, "", node.lineno


@pytest.mark.parametrize("path", find_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_word_per_thing(path: Path) -> None:
    found = []
    for name, annotation, line in find_names(ast.parse(path.read_text("utf-8"))):
        if name in INSTEAD_OF and path.relative_to(ROOT).as_posix() not in KEYS:
            found.append(f"line {line}: {name}; the word is {INSTEAD_OF[name]}")
        if name == "run" and annotation and not annotation.startswith(RUN_IS):
            found.append(f"line {line}: run: {annotation}; a run is a name")
    assert not found
