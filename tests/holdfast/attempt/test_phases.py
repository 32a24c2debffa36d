"""Where rehearsals start: at phases that differ from a commit's, before an epoch's end, and at other places later."""

import pytest

from holdfast.attempt.phases import PERIODS, choose_across, choose_inside, count_rehearsed, find_end
from holdfast.journal import RehearsedSteps


def inside(*starts: int) -> list[RehearsedSteps]:
    return [RehearsedSteps(kind="inside", start=start, stop=start + 4, has_end=False) for start in starts]


@pytest.mark.parametrize(
    ("start", "stop", "per_epoch"), [(16, 32, 16), (20, 40, 80), (60, 120, 120), (10**6, 10**7, 640)]
)
def test_the_first_start_lies_inside_every_period_soon_after_the_commit(start: int, stop: int, per_epoch: int) -> None:
    step = choose_inside(start, stop, per_epoch, [])
    assert start < step < min(stop - 1, start + 41)
    assert all((step - start) % period and step % per_epoch % period for period in PERIODS)


def test_a_chunk_has_a_start_inside_if_a_step_lies_on_either_side() -> None:
    assert [choose_inside(8, stop, 8, []) for stop in (9, 10, 11, 12)] == [0, 0, 9, 9]


def test_later_starts_have_other_places_and_phases() -> None:
    past: list[RehearsedSteps] = []
    for start in range(1000, 9000, 1000):
        past += inside(choose_inside(start, start + 1000, 1000, past))
    within = [each.start % 1000 for each in past]
    assert len({step // 250 for step in within}) == 4, "each quarter of a chunk has one"
    for period in PERIODS:
        assert len({step % period for step in within}) >= min(period - 1, 2), "a commit has the phase 0"


def test_a_rehearsal_across_an_epochs_end_trains_steps_of_both_epochs() -> None:
    for start, stop, per_epoch, total in [(16, 32, 16, 96), (20, 40, 30, 90), (0, 64, 16, 128), (8, 10, 5, 100)]:
        step = choose_across(start, stop, per_epoch, total, [])
        end = find_end(step, stop, per_epoch)
        assert start < step < end <= stop
        assert end - step <= 5


def test_no_rehearsal_goes_across_the_end_of_the_run_or_of_no_epoch() -> None:
    assert choose_across(80, 96, 16, 96, []) == 0
    assert choose_across(20, 29, 30, 90, []) == 0
    assert choose_across(4, 5, 5, 100, []) == 0, "no step lies between the commit and the epoch's end"


def test_a_rehearsal_lasts_as_long_as_the_restart_before_it() -> None:
    assert [count_rehearsed(30.0, speed) for speed in (0.0, 0.01, 1.0, 1000.0)] == [4, 4, 30, 64]
