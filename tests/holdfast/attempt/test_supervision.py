"""Tests of supervision: which endings spend which budget, and when a run gets no further attempt."""

from typing import Any

import pytest

from holdfast.attempt.supervision import Action, Supervised, choose_action, choose_wait_s, without_progress
from holdfast.config import Supervision
from holdfast.errors import (
    CheckpointDamaged,
    ConfigDrift,
    Damage,
    HoldfastError,
    Inexact,
    NoProgress,
    OutOfMemory,
    RankDied,
    RecipeFailed,
    RunHeld,
    RunStopped,
    StoreFull,
    Superseded,
    Unhealthy,
    WrongUse,
)
from holdfast.journal.endings import REASONS, Ending, ending_of

LIMITS = Supervision()
LOST_MACHINES = [name for name, row in REASONS.items() if row.spends == "max_preemptions"]
FAILURES = [name for name, row in REASONS.items() if row.spends == "max_failures"]
ENDS_THE_RUN = {name: row.raises for name, row in REASONS.items() if row.raises}


def ends(*found: tuple[str, int]) -> list[Ending]:
    return [Ending(reason, f"why {reason}", step) for reason, step in found]


CANCELLED, PREEMPTED, COMPLETED = ends(("cancelled", 8), ("preempted", 8), ("completed", 12))
DONE, START, WATCH = Action(Ending("completed")), Action(), Action()


def after(last: Ending, **facts: Any) -> Supervised:
    return Supervised(last=last, endings=[last], **facts)


@pytest.mark.parametrize(
    ("known", "action"),
    [
        (Supervised(), START),
        (Supervised(is_finished=True), DONE),
        (Supervised(is_finished=True, is_disputed=True), START),
        (Supervised(is_live=True), WATCH),
        (Supervised(is_live=True, is_finished=True), WATCH),
        (after(COMPLETED, is_finished=True), DONE),
        (after(COMPLETED, is_finished=True, is_dead=True), START),
        (after(COMPLETED, is_finished=True, is_disputed=True), START),
        (after(COMPLETED), START),
        (after(PREEMPTED), START),
        (after(PREEMPTED, is_finished=True), DONE),
        (after(CANCELLED), Action(CANCELLED)),
        (after(CANCELLED, is_finished=True), Action(CANCELLED)),
        (after(CANCELLED, was_cancelled=True), START),
        (after(CANCELLED, was_cancelled=True, is_finished=True), DONE),
        (Supervised(refusals=1), Action(wait_s=5)),
        (Supervised(refusals=3), Action(wait_s=20)),
        (Supervised(refusals=30), Action(wait_s=300)),
        (Supervised(refusals=1, is_finished=True), DONE),
        (Supervised(last=ends(("crashed", 8))[0], endings=ends(("preempted", 8), ("crashed", 8))), Action(wait_s=1)),
    ],
)
def test_what_comes_next(known: Supervised, action: Action) -> None:
    assert choose_action(known, LIMITS) == action


@pytest.mark.parametrize(
    ("endings", "error"),
    [
        (ends(*[("recipe_failed", 8)] * 4), NoProgress),
        (ends(("preempted", 8), ("settings", 8)), WrongUse),
        (ends(("inexact", 8)), Inexact),
    ],
)
def test_what_ends_a_run_before_it_is_complete(endings: list[Ending], error: type[HoldfastError]) -> None:
    with pytest.raises(error):
        choose_action(Supervised(last=endings[-1], endings=endings), LIMITS)


@pytest.mark.parametrize("reason", sorted(LOST_MACHINES))
def test_lost_machines_never_end_a_run_by_themselves(reason: str) -> None:
    assert choose_wait_s(ends(*[(reason, 0)] * 1000), LIMITS) > 0


def test_more_lost_machines_than_allowed_end_the_run() -> None:
    limits = Supervision(max_preemptions=2)
    choose_wait_s(ends(("preempted", 4), ("vanished", 8)), limits)
    with pytest.raises(NoProgress, match=r"the run has lost 3 machines, and supervision\.max_preemptions allows 2"):
        choose_wait_s(ends(("preempted", 4), ("vanished", 8), ("preempted", 12)), limits)
    choose_wait_s(
        ends(("preempted", 4), ("vanished", 8), ("preempted", 12), ("crashed", 16)), limits
    )  # not for a machine


@pytest.mark.parametrize("reason", FAILURES)
def test_failures_without_progress_end_the_run(reason: str) -> None:
    choose_wait_s(ends((reason, 36), (reason, 36), (reason, 36)), LIMITS)
    with pytest.raises(NoProgress, match=f"3 attempts in a row failed, and committed no step.* why {reason}"):
        choose_wait_s(ends((reason, 36), (reason, 36), (reason, 36), (reason, 36)), LIMITS)


def test_progress_resets_the_number_of_failures() -> None:
    found = ends(("rank_crashed", 4), ("rank_crashed", 4), ("rank_crashed", 4), ("rank_crashed", 8))
    assert choose_wait_s(found, LIMITS) == 0
    choose_wait_s([*found, *ends(("rank_crashed", 8), ("rank_crashed", 8))], LIMITS)
    with pytest.raises(NoProgress):
        choose_wait_s([*found, *ends(("rank_crashed", 8), ("rank_crashed", 8), ("rank_crashed", 8))], LIMITS)


def test_lost_machines_neither_count_as_failures_nor_reset_them() -> None:
    found = ends(("crashed", 0), ("preempted", 0), ("crashed", 0), ("vanished", 0))
    choose_wait_s(found, LIMITS)
    with pytest.raises(NoProgress, match="3 attempts in a row failed"):
        choose_wait_s([*found, *ends(("crashed", 0))], LIMITS)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("settings", WrongUse),
        ("damaged", Damage),
        ("superseded", Superseded),
        ("held", RunHeld),
        ("cancelled", RunStopped),
    ],
)
def test_errors_that_another_attempt_cannot_mend_are_raised(reason: str, error: type[HoldfastError]) -> None:
    with pytest.raises(error, match=f"why {reason}"):
        choose_wait_s(ends(("preempted", 4), (reason, 4)), LIMITS)


def test_the_wait_doubles_while_nothing_is_committed() -> None:
    assert choose_wait_s(ends(("preempted", 4)), LIMITS) == 0
    waits = [choose_wait_s(ends(*[("preempted", 0)] * number), LIMITS) for number in range(1, 12)]
    assert waits[:4] == [1, 2, 4, 8]
    assert waits[-1] == 300


def test_reaching_an_old_step_again_is_no_progress() -> None:
    found = ends(("preempted", 8), ("damaged", 4), ("preempted", 6), ("preempted", 9), ("preempted", 9))
    assert [end.step for end in without_progress(found)] == [9]
    assert [end.step for end in without_progress(found[:3])] == [4, 6]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigDrift("x"), "settings"),
        (CheckpointDamaged("x"), "damaged"),
        (StoreFull("x"), "store_failed"),
        (RankDied("x"), "rank_crashed"),
        (OutOfMemory("x"), "out_of_memory"),
        (RecipeFailed("x"), "recipe_failed"),
        (Unhealthy("x"), "unhealthy"),
        (Superseded("x"), "superseded"),
        (NoProgress("x"), "no_progress"),
        (NoProgress("x", reason="out_of_memory"), "out_of_memory"),
        (RunStopped("x"), "stopped"),
        (ZeroDivisionError("x"), "stopped"),
    ],
)
def test_the_reason_of_an_error(error: Exception, reason: str) -> None:
    assert ending_of(error).reason == reason
    assert reason in REASONS
