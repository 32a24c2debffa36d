"""Tests of drills: the kills that are left, and the verdict."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.proof.drill import VARIABLE, Kill, judge_drill, left_after, to_environment
from holdfast.store import open_store
from tests.support.makers import make_line, save_next, train

RANKS, ATTEMPT, MACHINE = Kill(what="ranks", at_step=2), Kill(what="attempt", at_step=4), Kill(at_step=6)


@pytest.mark.parametrize(
    ("ended_early", "left"),
    [(0, [RANKS, ATTEMPT, MACHINE]), (1, [MACHINE]), (2, []), (3, [])],
)
def test_kills_that_are_left_after_early_ends(ended_early: int, left: list[Kill]) -> None:
    assert left_after([RANKS, ATTEMPT, MACHINE], ended_early) == left


def test_kills_are_passed_in_the_environment() -> None:
    assert to_environment([]) == {}
    (text,) = to_environment([RANKS]).values()
    assert json.loads(text) == [{"what": "ranks", "how": "SIGKILL", "at_step": 2}]
    assert list(to_environment([RANKS])) == [VARIABLE]


@pytest.mark.parametrize("field", [{"what": "moon"}, {"how": "SIGHUP"}, {"at_step": 0}, {"when": 3}])
def test_a_wrong_kill_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Kill.model_validate({"at_step": 1} | field)


def test_a_drill_with_the_same_bytes_passes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    straight, drilled = make_line(store, "straight"), make_line(store, "drilled")
    for line in (straight, drilled):
        train(line)
        train(line)
    drilled.journal.end_attempt(1, Ending("rank_crashed", "x", 10))
    verdict = judge_drill([ATTEMPT], straight.journal, drilled.journal)
    assert verdict.is_passed
    assert str(verdict).splitlines()[0] == (
        "passed: 20 steps end on the same bytes, straight and with SIGKILL to the attempt at step 4"
    )
    assert "attempt   1 ended at step 10: rank crashed" in str(verdict)


def test_a_drill_with_other_bytes_fails(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    straight, drilled = make_line(store, "straight"), make_line(store, "drilled")
    train(straight)
    drilled.commit(save_next(drilled, size_bytes=128), "chunk")
    verdict = judge_drill([MACHINE], Journal(store, "straight"), Journal(store, "drilled"))
    assert not verdict.is_passed
    assert verdict.straight != verdict.drilled
    assert "failed: 10 steps end on OTHER bytes" in str(verdict)
    assert "None" not in str(verdict)  # the trails are equal, and only the ends differ
