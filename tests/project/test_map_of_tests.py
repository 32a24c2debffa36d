"""Tests that the map of the tests is complete, and that the longest tests begin first."""

import re
import subprocess
import sys

import pytest

from tests.conftest import COMMAND_WITHIN_S, LONGEST, ROOT, place
from tests.support.promises import PROMISES

TESTS = ROOT / "tests"


def read_table(heading: str) -> list[str]:
    """Return the first column of the first table below a heading."""
    text = (TESTS / "README.md").read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.M)


def find_folders() -> list[str]:
    """Return the folders below tests/ that hold Python files and test no room or module of the code."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py") if path.parent != TESTS}
    return sorted(f"{each}/" for each in folders if not ((ROOT / each).is_dir() or (ROOT / f"{each}.py").is_file()))


def find_shared() -> list[str]:
    return sorted(path.name for path in (TESTS / "support").glob("*.py"))


@pytest.mark.parametrize(
    ("heading", "found"),
    [("Find a test", find_folders()), ("What tests share", find_shared())],
    ids=["folders", "files"],
)
def test_the_map_is_complete(heading: str, found: list[str]) -> None:
    assert sorted(read_table(heading)) == found


def test_the_longest_files_begin_first() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    # The folder of an extension may be deleted with its tests.
    longest = [TESTS / name for name in LONGEST if "/extensions/" not in name or (TESTS / name).parent.is_dir()]
    assert sorted(files, key=place)[: len(longest)] == longest


def test_every_promise_is_shown_by_a_test_that_exists() -> None:
    shown = sorted({name for tests in PROMISES.values() for name in tests})
    files = {str(TESTS / name.partition("::")[0]) for name in shown}
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-m", "promise", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=COMMAND_WITHIN_S)
    found = [line.removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line]
    assert [name for name in shown if not any(each == name or each.startswith(f"{name}[") for each in found)] == []
