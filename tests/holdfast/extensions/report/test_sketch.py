"""Tests of thinned curves: no extreme is lost, and reading in pieces changes nothing."""

import math
import random

import numpy as np
import pytest

from holdfast.extensions.report.sketch import Curve, Sketch


def make_curve(values: list[float], commit: int = 1) -> Curve:
    return Curve.from_points([(commit, step, value) for step, value in enumerate(values, start=1)])


def extremes(curve: Curve, width: int) -> dict[int, tuple[float, float]]:
    found: dict[int, list[float]] = {}
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(value):
            found.setdefault(int(step) // width, []).append(float(value))
    return {bucket: (min(values), max(values)) for bucket, values in found.items()}


@pytest.fixture
def noise() -> Curve:
    draw = random.Random(3).gauss
    return make_curve([draw(0, 1) for _ in range(1000)])


def test_every_bucket_keeps_its_least_and_its_greatest_value(noise: Curve) -> None:
    thinned = noise.thin(16)
    assert len(thinned) <= 2 * 63 + 2
    assert extremes(thinned, 16) == extremes(noise, 16)
    assert (thinned.steps[0], thinned.steps[-1]) == (1, 1000)
    assert list(thinned.steps) == sorted(set(thinned.steps))


def test_one_spike_among_a_million_values_survives() -> None:
    values = np.zeros(1_000_000)
    values[765_432], values[123_456] = 9.0, -9.0
    steps = np.arange(1, 1_000_001)
    fitted = Curve(np.ones_like(steps), steps, values).fit(1000)
    assert len(fitted) <= 1002
    assert {765_433, 123_457} <= set(fitted.steps.tolist())


def test_thinning_twice_is_thinning_once(noise: Curve) -> None:
    twice, once = noise.thin(8).thin(32), noise.thin(32)
    assert extremes(twice, 32) == extremes(once, 32)


def test_values_that_are_not_finite_stay_visible() -> None:
    curve = make_curve([1.0] * 50 + [math.nan] * 100 + [math.inf] + [1.0] * 50)
    thinned = curve.thin(10)
    assert np.isnan(thinned.values).any()
    assert {1, 201} <= set(thinned.steps.tolist())
    assert not np.isfinite(make_curve([math.nan] * 100).thin(10).values).any()


def test_a_sketch_stays_small_and_keeps_commits_apart() -> None:
    sketch = Sketch(most=500)
    for commit in range(1, 41):
        steps = range(100 * (commit - 1) + 1, 100 * commit + 1)
        sketch.add(commit, "loss", steps, [float(step % 97) for step in steps])
        sketch.settle()
    curve = sketch.read("loss")
    assert len(curve) <= 500
    assert set(curve.commits.tolist()) == set(range(1, 41))
    assert curve.of({7}).values.max() == 96.0
    assert set(curve.of({7}).commits.tolist()) == {7}


def test_a_thinned_sketch_still_counts_every_value() -> None:
    sketch = Sketch(most=100)
    for commit in range(1, 21):
        sketch.add(commit, "loss", range(50 * commit, 50 * commit + 50), [1.0, math.nan] * 20 + [math.inf] * 10)
        sketch.settle()
    assert len(sketch.read("loss")) < 200
    assert sketch.count("loss", {3, 4}) == (100, 60)
    assert sketch.count("loss", range(1, 21)) == (1000, 600)


def test_a_sketch_of_more_commits_than_points_settles() -> None:
    sketch = Sketch(most=10)
    for commit in range(1, 101):
        sketch.add(commit, "loss", [2 * commit, 2 * commit + 1], [1.0, 2.0])
        sketch.settle()
    assert len(sketch.read("loss")) >= 100


def test_an_empty_curve_is_drawn() -> None:
    empty = make_curve([1.0]).of(())
    assert len(empty.fit(10)) == len(empty.thin(10)) == 0
