"""The reasons why an attempt ends are one table, and what others say of them agrees with it."""

import re
from pathlib import Path

import pytest

from holdfast.config import Supervision
from holdfast.errors import HoldfastError, RunStopped
from holdfast.journal.endings import REASONS, Ending, ending_of

ROOT = Path(__file__).parents[3]
FORMAT, TROUBLES = ROOT / "holdfast" / "FORMAT.md", ROOT / "docs" / "troubleshooting.md"


def test_the_format_has_a_row_for_each_reason() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", FORMAT.read_text("utf-8"), re.M)
    expected = [(row.name, row.meaning, f"yes, `{row.spends}`" if row.retries else "no") for row in REASONS.values()]
    assert [row for row in rows if row[0] in REASONS] == expected


def test_the_page_on_troubles_has_a_row_for_each_reason() -> None:
    table = TROUBLES.read_text("utf-8").partition("## What to do when an attempt ends")[2].partition("\n## ")[0]
    names = re.findall(r"^\| ([a-z ]+) \| ", table, re.M)
    assert set(names) - {"reason"} == {name.replace("_", " ") for name in REASONS}


def test_a_reason_spends_a_budget_that_there_is() -> None:
    assert {row.spends for row in REASONS.values()} - {""} <= Supervision.model_fields.keys()


def test_a_reason_that_ends_the_run_allows_no_other_attempt() -> None:
    assert not [row.name for row in REASONS.values() if row.raises and row.retries]


def test_every_error_ends_an_attempt_for_a_known_reason() -> None:
    kinds = [HoldfastError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.reason for kind in kinds} < REASONS.keys()


def test_a_reason_of_a_later_version_counts_as_stopped() -> None:
    assert Ending("eaten_by_a_bear").row is REASONS["stopped"]


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (None, Ending("completed")),
        (RunStopped("no", hint="do"), Ending("stopped", "no; do")),
        (RunStopped("no", reason="unhealthy"), Ending("unhealthy", "no")),
        (ZeroDivisionError("by 0"), Ending("stopped", "ZeroDivisionError: by 0")),
        (KeyboardInterrupt(), Ending("preempted", "told to end by a signal")),
    ],
    ids=repr,
)
def test_an_error_ends_an_attempt(error: BaseException | None, ending: Ending) -> None:
    assert ending_of(error) == ending
