"""Tests of the loss on a pool whose scheduler takes any run, or the one that loses least."""

import random

import pytest

from holdfast.ledger.interval import Measured
from holdfast.ledger.pool import choose_cheapest, forecast_pool
from holdfast.ledger.traces import Trace

HOUR = 3600.0


def trace_of(lengths_s: list[float]) -> Trace:
    ends, at = [], 0.0
    for each in lengths_s:
        ends.append((at, at + each))
        at += each
    return Trace(name="made", span_s=at, up=ends)


@pytest.mark.parametrize("runs", [2, 4, 9])
def test_the_loss_agrees_with_the_closed_form(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The age of a run's last durable commit is uniform from 5 to 105 s; the least of n ages is 5 + 100 / (n + 1) on
    # average.
    monkeypatch.setattr("holdfast.ledger.pool.DRAWS", 4000)
    found = forecast_pool(trace_of([5000.0]), Measured(1.0, 0.0, 5.0, 0.0, count=9), 100, runs, ranks=1)
    assert found.random.lost_h * HOUR == pytest.approx(5 + 100 / 2, rel=0.05)
    assert found.cheapest.lost_h * HOUR == pytest.approx(5 + 100 / (runs + 1), rel=0.05)
    assert found.random.restart_h == found.cheapest.restart_h == 0


def test_a_run_that_is_taken_while_it_restarts_loses_the_begun_restart() -> None:
    known = Measured(1.0, 2.0, 4.0, 10.0, count=9)
    found = forecast_pool(trace_of([1000.0, 5.0, 995.0]), known, 100, runs=1, ranks=8)
    assert found.random == found.cheapest, "one run leaves no choice"
    assert found.random.restart_h * HOUR == pytest.approx(8 * (10 + 5 + 10))
    # The second life trains nothing, and the third one 985 s: 9 chunks of 102 s and 67 steps. The first one is killed
    # somewhere in a chunk: 2 to 104 s after the commit of which it would go on.
    first_s = found.random.lost_h * HOUR / 8 - 67
    assert first_s == pytest.approx((2 + 102) / 2, rel=0.2)
    assert found.random.most == 1


def test_among_equal_losses_any_run_is_taken() -> None:
    chance = random.Random(0)
    assert {choose_cheapest([3.0, 1.0, 1.0, 2.0, 1.0], chance) for _ in range(50)} == {1, 2, 4}
    assert {choose_cheapest([3.0, 1.0, 0.5], chance) for _ in range(50)} == {2}


def test_a_run_that_restarts_loses_nothing_and_is_taken_again() -> None:
    known = Measured(1.0, 0.0, 5.0, 90.0, count=9)
    found = forecast_pool(trace_of([60.0] * 40), known, 1000, runs=4, ranks=1)
    assert found.cheapest.most == 1 > 0.5 > found.random.most
    assert found.cheapest.restart_h * HOUR == pytest.approx(90 + 39 * 60)
