"""Tests of the bounds on how long a step, a save or a commit takes, and of how much a save slows steps."""

import math

import pytest

from holdfast.ledger.durations import FEW, Durations, Slowing


def durations(*seconds: float, **options: float) -> Durations:
    found = Durations(**options)
    for each in seconds:
        found.add(each)
    return found


def test_while_little_is_known_the_next_one_may_take_twice_as_long() -> None:
    assert durations().bound_s == math.inf
    assert durations(unknown_s=1.0).bound_s == 1.0
    assert durations(3.0).bound_s == 6.0
    assert durations(1.0, 3.0, 2.0).bound_s == 6.0


def test_equal_durations_leave_no_room_for_doubt() -> None:
    assert durations(*[2.0] * FEW).bound_s == pytest.approx(2.0)


def test_the_bound_follows_from_the_spread() -> None:
    seconds = [1.0, 1.2, 0.8, 1.1, 0.9]
    deviation_s = math.sqrt(sum((each - 1.0) ** 2 for each in seconds) / 4)
    assert durations(*seconds).bound_s == pytest.approx(1.2 + 3 * deviation_s)


def test_a_wide_spread_asks_for_no_more_than_an_unknown_one() -> None:
    assert durations(0.1, 0.1, 0.1, 0.1, 10.0).bound_s == 20.0


def test_a_bound_can_have_a_floor() -> None:
    assert durations(*[0.01] * FEW, least_s=0.2).bound_s == 0.2


def test_a_save_costs_what_the_steps_beside_it_take_longer() -> None:
    slowing = Slowing()
    assert slowing.take_s() == 0.0
    for _ in range(5):
        slowing.add(0.1, is_beside=False)
    slowing.add(9.0, is_beside=False)  # an evaluation
    for _ in range(4):
        slowing.add(0.15, is_beside=True)
    assert slowing.take_s() == pytest.approx(4 * 0.05)
    assert slowing.take_s() == 0.0, "each step counts once"
    slowing.add(0.05, is_beside=True)
    assert slowing.take_s() == 0.0, "a save gains no time"


def test_without_a_step_alone_nothing_is_known() -> None:
    slowing = Slowing()
    slowing.add(0.5, is_beside=True)
    assert slowing.take_s() == 0.0
