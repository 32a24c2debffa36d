"""Tests of the expected goodput on preemption traces: against the closed form, and a simulation in time."""

import json
import random
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.ledger.forecast import Warning, find_best_steps, forecast, replay, reserve_s
from holdfast.ledger.goodput import Spent
from holdfast.ledger.interval import Losses, Measured, choose_interval, expect
from holdfast.ledger.traces import Trace, list_shipped, read_trace

HOUR = 3600.0
# (cost of a save, seconds until it is durable, restart), as docs/goodput.md has them.
PROFILES = {"cheap": (0.3, 15.0, 35.0), "asynchronous": (3.0, 60.0, 150.0)}
MEANS = {"single": 1.7 * HOUR, "gang": 2.6 * HOUR, "dense": 0.46 * HOUR}


def measured(cost_s: float, save_s: float, restart_s: float, step_s: float = 0.1) -> Measured:
    return Measured(step_s, cost_s, save_s, restart_s, count=9)


def trace_of(lengths_s: list[float], **fields: object) -> Trace:
    ends, at = [], 0.0
    for each in lengths_s:
        ends.append((at, at + each))
        at += each
    return Trace.model_validate({"name": "made", "span_s": at, "up": ends} | fields)


def exponential(mean_s: float, count: int = 20_000) -> list[float]:
    chance = random.Random(1)
    return [chance.expovariate(1 / mean_s) for _ in range(count)]


# ---- the closed form


@pytest.mark.parametrize("pool", MEANS)
def test_exponential_lifetimes_agree_with_the_closed_form(pool: str) -> None:
    known, mean_s = measured(*PROFILES["cheap"]), MEANS[pool]
    losses = Losses(1_000_000, 1_000_000 * mean_s)
    chosen = choose_interval(known, losses)
    expected = 1 - expect(known, losses, chosen.interval_s).total
    found = Spent.sum(replay(exponential(mean_s), known, chosen.interval_s))
    assert found.goodput == pytest.approx(expected, abs=0.003)
    assert found.limit == pytest.approx(1 - known.restart_s / mean_s, abs=0.003)


def test_the_best_length_on_exponential_lifetimes_is_youngs() -> None:
    known, mean_s = measured(2.0, 1.0, 30.0, step_s=1.0), 2 * HOUR
    trace = trace_of(exponential(mean_s, 4000))
    young = choose_interval(known, Losses(10**6, 10**6 * mean_s))
    best = forecast(trace, known, find_best_steps(trace, known))
    assert best.goodput == pytest.approx(forecast(trace, known, young.steps).goodput, abs=0.001)
    assert young.interval_s / 1.5 < best.interval_s < young.interval_s * 1.5


# ---- one interval, by the millisecond


def simulate(length_s: float, known: Measured, interval_s: float, notice_s: float, is_lost: bool) -> float:
    """Return the training that survives, by living through the interval in steps of 10 ms."""
    tick_s = 0.01
    ticks = round(length_s / tick_s)
    told_at = ticks - round(notice_s / tick_s)
    trained = safe = 0.0
    saving: list[tuple[float, float]] = []  # when a save becomes durable, and what it holds
    busy_until, since = known.restart_s, 0.0
    for tick in range(ticks):
        now = tick * tick_s
        safe = max([safe, *(held for durable, held in saving if durable <= now)])
        if tick >= told_at and is_lost and now >= length_s - reserve_s(known) and notice_s >= reserve_s(known):
            return max(safe, trained)
        if now < busy_until - tick_s / 2:
            continue
        trained, since = trained + tick_s, since + tick_s
        if since >= interval_s - tick_s / 2:
            saving.append((now + tick_s + known.save_s, trained))
            busy_until, since = now + tick_s + known.cost_s, 0.0
    return safe if is_lost else trained


@pytest.mark.parametrize("notice_s", [0.0, 5.0, 60.0])
@pytest.mark.parametrize("is_lost", [True, False])
def test_each_interval_gives_what_living_through_it_gives(notice_s: float, is_lost: bool) -> None:
    known = measured(1.0, 4.0, 12.0, step_s=0.01)
    for length_s in (5.0, 12.0, 40.0, 61.3, 100.0, 171.7, 302.4):
        (found,) = replay([length_s], known, 20.0, Warning(notice_s, kept=1.0), is_censored=not is_lost)
        lived = simulate(length_s, known, 20.0, notice_s if notice_s else 0.0, is_lost)
        assert found.productive_s == pytest.approx(lived, abs=0.1), length_s


def test_a_notice_is_worth_nothing_without_time_for_a_save() -> None:
    known, lives = measured(*PROFILES["cheap"]), exponential(HOUR, 500)
    without = Spent.sum(replay(lives, known, 60.0)).goodput
    assert reserve_s(known) > 30
    assert Spent.sum(replay(lives, known, 60.0, Warning(30.0))).goodput == without
    assert Spent.sum(replay(lives, known, 60.0, Warning(120.0))).goodput > without
    half = Spent.sum(replay(lives, known, 60.0, Warning(120.0, kept=0.5))).goodput
    assert without < half < Spent.sum(replay(lives, known, 60.0, Warning(120.0))).goodput


def test_the_spread_holds_nine_of_ten_histories() -> None:
    known, mean_s = measured(*PROFILES["asynchronous"]), HOUR
    chance = random.Random(2)
    expected = forecast(trace_of([chance.expovariate(1 / mean_s) for _ in range(50)]), known, 1500)
    assert expected.low < expected.goodput < expected.high
    histories = [[chance.expovariate(1 / mean_s) for _ in range(50)] for _ in range(400)]
    goodputs = [Spent.sum(replay(each, known, 150.0)).goodput for each in histories]
    width = sorted(goodputs)[380] - sorted(goodputs)[20]
    assert expected.high - expected.low == pytest.approx(width, rel=0.5)


# ---- traces


@pytest.mark.parametrize("name", list_shipped())
def test_each_shipped_trace_gives_a_forecast(name: str) -> None:
    trace, known = read_trace(name), measured(*PROFILES["cheap"])
    best = forecast(trace, known, find_best_steps(trace, known))
    assert 0.8 < best.low <= best.goodput <= best.high <= best.limit <= 1
    assert any(licence in trace.source for licence in ("MIT", "Apache-2.0"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"span_s": 1, "up": [[0, 1]]}', "name: Field required"),
        ('{"name": "a", "span_s": 1, "up": []}', "up: List should have at least 1 item"),
        ('{"name": "a", "span_s": 9, "up": [[0, 3], [2, 4]]}', "interval 1 begins at 2 s, before the one before it"),
        ('{"name": "a", "span_s": 9, "up": [[3, 3]]}', "interval 0 ends at 3 s, but begins at 3 s"),
        ('{"name": "a", "span_s": 9, "up": [[0, NaN]]}', "up.0.1: Input should be a finite number"),
        ('{"name": "a", "span_s": 9, "up": [[0, "x"]]}', "up.0.1: Input should be a valid number"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_trace(str(path))
    assert str(path) in str(refused.value)
    assert said in str(refused.value)
    assert "expected JSON such as" in refused.value.hint


def test_a_trace_of_ones_own_needs_three_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "span_s": 7200, "up": [[0, 3000], [3120, 7000]]}))
    trace = read_trace(str(path))
    assert (trace.preemptions, trace.available_s, trace.mean_s) == (2, 6880, 3440)
    with pytest.raises(ConfigError, match="there is no trace 'nothing': No such file") as refused:
        read_trace("nothing")
    assert list_shipped()[0] in refused.value.hint
