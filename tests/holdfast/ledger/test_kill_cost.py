"""The cost of a kill at one moment, as numbers that follow from the measured times."""

import pytest

from holdfast.journal import Commit, format_time, seconds_of
from holdfast.ledger.forecast import reserve_s
from holdfast.ledger.interval import Cost, measure_costs
from holdfast.ledger.kill_cost import KillCost
from tests.support.makers import make_commit

AT = "2026-01-02T03:04:05+00:00"
COSTS = [Cost(step_s=2.0, stall_s=0.5, save_s=3.0, restart_s=40.0)] * 3


def commit(step: int) -> Commit:
    return make_commit(7, step=step, created_at=AT)


def cost(head: Commit | None, step: int, stop: int = 90, costs: list[Cost] = COSTS, speed: float = 0.0) -> KillCost:
    now = seconds_of(AT) + 30
    return KillCost.of("run", 2, head, step, costs=costs, gpus=16, next_commit_step=stop, now=now, speed=speed)


def after(seconds: float) -> str:
    return format_time(seconds_of(AT) + 30 + seconds)


def test_a_kill_costs_the_steps_since_the_commit_on_every_gpu() -> None:
    found = cost(commit(60), 75)
    assert (found.commit, found.commit_step, found.committed_at, found.since_commit_s) == (7, 60, AT, 30.0)
    assert (found.lost_s, found.lost_gpu_s) == (30.0, 480.0)
    assert found.restart_s == 40.0


def test_a_save_is_bounded_as_in_the_plan() -> None:
    measured = measure_costs(COSTS)
    assert measured is not None
    assert cost(commit(60), 75).save_within_s == reserve_s(measured) == 11.0


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        (75, 15 * 2.0 + 3.0),  # the chunk's steps, and its save
        (90, 3.0),
        (91, 1.0),  # the ranks train the next chunk while this one is saved
        (95, 0.0),  # the save takes longer than usual
    ],
)
def test_the_next_safe_moment_is_the_next_commit(step: int, seconds: float) -> None:
    assert cost(commit(60), step).safe_at == after(seconds)


def test_a_run_without_a_commit_is_measured_by_its_speed() -> None:
    found = cost(None, 10, costs=[], speed=4.0)
    assert (found.lost_s, found.lost_gpu_s, found.safe_at) == (2.5, 40.0, after(20.0))
    assert (found.commit, found.commit_step, found.committed_at, found.since_commit_s) == (0, 0, None, None)
    assert (found.save_within_s, found.restart_s) == (None, 0.0)


def test_what_is_unknown_is_left_out() -> None:
    found = cost(None, 0, costs=[])
    assert (found.lost_s, found.lost_gpu_s, found.safe_at) == (None, None, None)
    assert cost(commit(60), 75, stop=0).safe_at is None


def test_a_clock_that_goes_back_gives_no_negative_age() -> None:
    future = commit(60).model_copy(update={"created_at": "2027-01-02T03:04:05+00:00"})
    assert cost(future, 75).since_commit_s == 0.0
