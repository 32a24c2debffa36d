"""Spikes: the steps whose loss or gradient norm is far above that of the steps before.

Commits record spikes, `holdfast watch` and the report show them, and `holdfast explain` judges the losses of samples by
the same rule. The functions depend on their arguments alone.

A number is compared with the median of the numbers before it, in units of their median absolute deviation. A few
earlier spikes hardly change either of the two. This test alone isn't enough for series with heavy tails, such as
gradient norms, in which numbers far from the median are common. So a spike's distance above the median must also be a
multiple of the largest distance of the numbers before it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from holdfast.journal.records import Spike

WINDOW = 64  # the number of earlier steps with which a step is compared
# With fewer numbers in the window, only numbers that aren't finite are spikes.
LEAST = 16
# A number is far above others if it exceeds their median by this many median absolute deviations. In a normal
# distribution this happens once in 10**11 times.
DEVIATIONS = 10.0
# The minimum deviation, as a fraction of the median. If the earlier numbers are almost equal, their own deviation is
# almost 0. Without this bound even a slightly larger number would then count as far above them.
LEAST_DEVIATION = 0.01
# A spike exceeds the median by at least this multiple of the window's largest excess over the median.
BEYOND = 5.0
# The number of ordinary steps after which another spike may begin, because a spike often lasts for a few steps.
QUIET = 8
MOST = 8  # the maximum number of spikes in a commit's record
WATCHED = ("loss", "grad_norm")


class UsualLoss(BaseModel):
    """The usual loss: the median and the median absolute deviation of several losses."""

    median: float
    deviation: float
    count: int

    def is_far(self, loss: float) -> bool:
        """Return whether a loss is far above the usual loss, or not finite."""
        least = LEAST_DEVIATION * abs(self.median)
        return not loss <= self.median + DEVIATIONS * max(self.deviation, least)


def make_usual(losses: Sequence[float]) -> UsualLoss | None:
    """Return the median and the median absolute deviation of losses; None for fewer than three losses."""
    if len(losses) < 3:
        return None
    median = statistics.median(losses)
    deviation = statistics.median(abs(loss - median) for loss in losses)
    return UsualLoss(median=median, deviation=deviation, count=len(losses))


def _read_number(line: Mapping[str, Any], name: str) -> float | None:
    """Return the number with this name in a trail's line, perhaps NaN or infinity; None if there is no number."""
    value = line.get(name)
    if isinstance(value, str):  # the trail has NaN and infinity as texts
        return math.nan
    return float(value) if isinstance(value, int | float) else None


def keep_watched(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields of a trail's last lines that `find_spikes` needs as its argument ``before``."""
    return [{name: line[name] for name in ("step", *WATCHED) if name in line} for line in lines[-WINDOW - QUIET :]]


def describe_spikes(spikes: Sequence[Spike]) -> dict[int, str]:
    """Return a text for each step that has spikes, by the step's number."""
    steps = dict.fromkeys(spike.step for spike in spikes)
    found = {step: "; ".join(str(spike) for spike in spikes if spike.step == step) for step in steps}
    return {step: f"the loss or its gradient has jumped in step {step}: {text}" for step, text in found.items()}


def find_spikes(before: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> list[Spike]:
    """Return the spikes among the steps of a trail, in their order; at most `MOST`.

    If high numbers follow each other within `QUIET` steps, as in a loss that stays high, only the first is a spike.

    Args:
        before: the lines of earlier steps: `WINDOW` + `QUIET` of them if there are so many.
        lines: the lines of the steps to judge.
    """
    found = [spike for name in WATCHED for spike in _find_of(name, before, lines)]
    return sorted(found, key=lambda spike: (spike.step, WATCHED.index(spike.name)))[:MOST]


def _find_of(name: str, before: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> list[Spike]:
    """Return the spikes in the numbers with this name, loss or gradient norm."""
    window: list[float] = []
    spikes: list[Spike] = []
    last_far, first = -QUIET, int(lines[0]["step"]) if lines else 0
    for line in (*before, *lines):
        value = _read_number(line, name)
        if value is None:
            continue
        step = int(line["step"])
        if _is_spike(window, value):
            if step >= first and step - last_far > QUIET:
                usual = statistics.median(window) if len(window) >= LEAST else None
                spikes.append(Spike(step, name, value if math.isfinite(value) else None, usual))
            last_far = step
        if math.isfinite(value):
            window = [*window[1 - WINDOW :], value]
    return spikes


def _is_spike(window: Sequence[float], value: float) -> bool:
    if not math.isfinite(value):
        return True
    if len(window) < LEAST or value <= max(window):  # most steps return here, before two medians are computed
        return False
    usual = make_usual(window)
    assert usual is not None
    return usual.is_far(value) and value - usual.median > BEYOND * (max(window) - usual.median)
