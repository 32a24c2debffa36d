"""Tests of supervision: which endings spend which budget, and when a run gets no further attempt."""

import pytest

from holdfast.attempt.supervision import judge, without_progress
from holdfast.config import Supervision
from holdfast.errors import (
    CheckpointDamaged,
    ConfigDrift,
    Damage,
    HoldfastError,
    NoProgress,
    OutOfMemory,
    RankDied,
    RecipeFailed,
    RunStopped,
    StoreFull,
    Superseded,
    Unhealthy,
    WrongUse,
)
from holdfast.journal.endings import REASONS, Ending, ending_of

LIMITS = Supervision(backoff_s=1.0)
LOST_MACHINES = [name for name, row in REASONS.items() if row.spends == "max_preemptions"]
FAILURES = [name for name, row in REASONS.items() if row.spends == "max_failures"]
ENDS_THE_RUN = {name: row.raises for name, row in REASONS.items() if row.raises}


def ends(*found: tuple[str, int]) -> list[Ending]:
    return [Ending(reason, f"why {reason}", step) for reason, step in found]


@pytest.mark.parametrize("reason", sorted(LOST_MACHINES))
def test_lost_machines_never_end_a_run_by_themselves(reason: str) -> None:
    assert judge(ends(*[(reason, 0)] * 1000), LIMITS) > 0


def test_more_lost_machines_than_allowed_end_the_run() -> None:
    limits = Supervision(max_preemptions=2)
    judge(ends(("preempted", 4), ("vanished", 8)), limits)
    with pytest.raises(NoProgress, match=r"3 machines were lost, and supervision\.max_preemptions is 2"):
        judge(ends(("preempted", 4), ("vanished", 8), ("preempted", 12)), limits)
    judge(ends(("preempted", 4), ("vanished", 8), ("preempted", 12), ("crashed", 16)), limits)  # not for a machine


@pytest.mark.parametrize("reason", FAILURES)
def test_failures_without_progress_end_the_run(reason: str) -> None:
    judge(ends((reason, 36), (reason, 36), (reason, 36)), LIMITS)
    with pytest.raises(NoProgress, match=f"3 attempts in a row failed .* why {reason}"):
        judge(ends((reason, 36), (reason, 36), (reason, 36), (reason, 36)), LIMITS)


def test_progress_resets_the_number_of_failures() -> None:
    found = ends(("rank_crashed", 4), ("rank_crashed", 4), ("rank_crashed", 4), ("rank_crashed", 8))
    assert judge(found, LIMITS) == 0
    judge([*found, *ends(("rank_crashed", 8), ("rank_crashed", 8))], LIMITS)
    with pytest.raises(NoProgress):
        judge([*found, *ends(("rank_crashed", 8), ("rank_crashed", 8), ("rank_crashed", 8))], LIMITS)


def test_lost_machines_neither_count_as_failures_nor_reset_them() -> None:
    found = ends(("crashed", 0), ("preempted", 0), ("crashed", 0), ("vanished", 0))
    judge(found, LIMITS)
    with pytest.raises(NoProgress, match="3 attempts in a row failed"):
        judge([*found, *ends(("crashed", 0))], LIMITS)


@pytest.mark.parametrize(
    ("reason", "error"),
    [("settings", WrongUse), ("damaged", Damage), ("superseded", Superseded), ("cancelled", RunStopped)],
)
def test_errors_that_another_attempt_cannot_mend_are_raised(reason: str, error: type[HoldfastError]) -> None:
    with pytest.raises(error, match=f"why {reason}"):
        judge(ends(("preempted", 4), (reason, 4)), LIMITS)


def test_the_wait_doubles_while_nothing_is_committed() -> None:
    assert judge(ends(("preempted", 4)), LIMITS) == 0
    waits = [judge(ends(*[("preempted", 0)] * number), LIMITS) for number in range(1, 12)]
    assert waits[:4] == [1, 2, 4, 8]
    assert waits[-1] == 300
    assert judge(ends(*[("preempted", 0)] * 1000), Supervision(backoff_s=0)) == 0


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
