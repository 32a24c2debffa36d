"""Tests ask for the command line and the variables of a process, and wait for its end, in ways that never race."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

INSTEAD_OF = {
    "cmdline": "tests.support.processes.command_of",
    "environ": "tests.support.processes.variables_of",
    "wait_procs": "tests.conftest.await_ended",
}
ASKS = Path("tests/support/processes.py")


def find_looks(source: str) -> list[str]:
    """Return the lines of calls that race with a process's beginning or end, each with the name of the right call."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    found = [(call.lineno, call.func.attr) for call in calls if isinstance(call.func, ast.Attribute)]
    return [f"line {line}: {name}; the call is {INSTEAD_OF[name]}" for line, name in found if name in INSTEAD_OF]


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("'word' in psutil.Process(pid).cmdline()", True),
        ("process.environ()['NAME']", True),
        ("psutil.wait_procs(processes, timeout=30)", True),
        ("os.environ['NAME']", False),
        ("command_of(process)", False),
    ],
)
def test_looks_that_race_are_found(source: str, is_found: bool) -> None:
    assert bool(find_looks(source)) == is_found


def test_no_test_races_with_a_process() -> None:
    names = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "bench"}
    looks = {str(name): find_looks((ROOT / name).read_text("utf-8")) for name in names - {ASKS}}
    assert not {name: lines for name, lines in looks.items() if lines}
