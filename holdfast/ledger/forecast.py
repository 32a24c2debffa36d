"""The goodput that a run can expect: a replay of the recorded intervals between preemptions.

An interval begins with a restart. Then the run trains chunks; each save takes training time, and protects the steps
before it once it is durable. A loss without a notice costs all training since the newest durable save. A loss with a
notice that leaves time for a last save costs only the time of that save.

For exponentially distributed lifetimes, the replay agrees with Young's closed form, `holdfast.ledger.interval.expect`,
as long as restarts, saves and intervals are short against the mean lifetime. The replay assumes no distribution of
lifetimes, because recorded lifetimes have heavy tails.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.ledger.durations import MARGIN_S, SAFETY
from holdfast.ledger.goodput import Spent
from holdfast.ledger.interval import FLOOR_S, SAVES, Measured
from holdfast.ledger.traces import Trace

# The share of losses that a notice announces; all other losses come without a notice.
KEPT = 0.9
# The seconds between a cloud's notice and the loss: 30 at Google Cloud and Azure, 120 at AWS.
NOTICES_S = (30.0, 120.0)
HISTORIES = 400
TRIES = 48


@dataclass(frozen=True)
class Warning:
    """The notices that announce the loss of a machine.

    Attributes:
        notice_s: seconds between a notice and the loss; 0 for no notices.
        kept: the share of losses that a notice precedes.
    """

    notice_s: float = 0.0
    kept: float = KEPT


def replay(
    lengths_s: Sequence[float],
    measured: Measured,
    interval_s: float,
    warning: Warning = Warning(),
    *,
    is_censored: bool = False,
) -> list[Spent]:
    """Return one `Spent` for each interval in which a run's machines are up: how the run spends this time.

    Args:
        lengths_s: the length of each interval, in seconds.
        interval_s: seconds of training between two saves.
        is_censored: whether the last interval ended without a loss.
    """
    last = len(lengths_s) - 1
    return [
        _replay_one(each, measured, interval_s, warning, is_lost=not (is_censored and number == last))
        for number, each in enumerate(lengths_s)
    ]


def _replay_trace(trace: Trace, measured: Measured, steps: int, warning: Warning = Warning()) -> list[Spent]:
    """Return one `Spent` for each interval of a trace, for a run with chunks of `steps` steps."""
    interval_s = steps * measured.step_s
    return replay(trace.lengths_s, measured, interval_s, warning, is_censored=trace.last_up_is_censored)


def _replay_one(length_s: float, measured: Measured, interval_s: float, warning: Warning, *, is_lost: bool) -> Spent:
    restart_s = min(length_s, measured.restart_s)
    trains_s = length_s - restart_s
    if not is_lost:
        return Spent(length_s, _trained_s(trains_s, measured, interval_s), restart_s)
    cycle_s = interval_s + measured.cost_s
    # The save after the n-th interval begins at n x cycle - cost, and is durable `save_s` later.
    saved_s = interval_s * max(0.0, (trains_s - measured.save_s + measured.cost_s) // cycle_s)
    if (needed_s := reserve_s(measured)) > warning.notice_s:
        return Spent(length_s, saved_s, restart_s)
    drained_s = _trained_s(max(trains_s - needed_s, 0.0), measured, interval_s)
    productive_s = warning.kept * drained_s + (1 - warning.kept) * saved_s
    return Spent(length_s, productive_s, restart_s)


def _trained_s(seconds: float, measured: Measured, interval_s: float) -> float:
    """Return how much of this time, in seconds, is training; the rest is taken by saves."""
    cycles, rest_s = divmod(seconds, interval_s + measured.cost_s)
    return cycles * interval_s + min(rest_s, interval_s)


def reserve_s(measured: Measured) -> float:
    """Return how many seconds before a deadline a run begins its last save, while it has measured few durations."""
    return SAFETY * (measured.save_s + measured.step_s) + MARGIN_S


@dataclass(frozen=True)
class Forecast:
    """The expected goodput of a run on a trace, with chunks of one length.

    Attributes:
        low, high: bounds of the goodput in nine of ten histories that have the trace's length and are drawn from its
            intervals.
        per_hour: hours of training that survive for each hour of the trace, including the time without machines.
    """

    interval_s: float
    steps: int
    goodput: float
    low: float
    high: float
    limit: float
    efficiency: float
    per_hour: float


def forecast(trace: Trace, measured: Measured, steps: int, warning: Warning = Warning()) -> Forecast:
    """Return the goodput that a run with chunks of `steps` steps can expect on a trace, and the spread of this goodput.

    The spread comes from a bootstrap over the intervals of the trace, with the same random numbers in each call.
    """
    parts = _replay_trace(trace, measured, steps, warning)
    total = Spent.sum(parts)
    chance = random.Random(0)
    drawn = [Spent.sum(chance.choices(parts, k=len(parts))).goodput for _ in range(HISTORIES)]
    twentieths = statistics.quantiles(drawn, n=20, method="inclusive")
    return Forecast(
        interval_s=steps * measured.step_s,
        steps=steps,
        goodput=total.goodput,
        low=twentieths[0],
        high=twentieths[-1],
        limit=total.limit,
        efficiency=total.efficiency,
        per_hour=total.productive_s / max(trace.span_s, trace.up[-1][1]),
    )


def find_best_steps(trace: Trace, measured: Measured) -> int:
    """Return the length of chunks, in steps, with the highest goodput on a trace.

    Try lengths from the shortest that a run chooses (`FLOOR_S`, or `SAVES` times a save) to the mean lifetime.
    """
    shortest_s = max(FLOOR_S, SAVES * measured.save_s)
    ratio = max(trace.mean_s / shortest_s, 1.0)
    tried_s = (shortest_s * ratio ** (number / (TRIES - 1)) for number in range(TRIES))
    lengths = sorted({max(1, round(each / measured.step_s)) for each in tried_s})
    best: int = max(lengths, key=lambda steps: Spent.sum(_replay_trace(trace, measured, steps)).goodput)
    return best
