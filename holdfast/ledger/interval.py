"""The best length of a chunk, computed from the cost of saves and the rate at which machines are lost.

A save costs training ``c`` seconds: training pauses while the state is copied, and the steps during the save take
longer, because hashing and writing take cores and bandwidth (0.07 to 0.28 s/GB in all). A loss costs the training since
the last save: half an interval ``T`` on average. With ``M`` seconds between losses, the fraction ``c/T + T/2M`` of
the time is lost, which is smallest at ``T = sqrt(2cM)``. A save that is durable ``d`` seconds later and a restart of
``R`` seconds add ``(R + d)/M``, for any interval. Source: J. W. Young, A first order approximation to the optimum
checkpoint interval, 1974.

Announced losses don't count, because an attempt that is told to end saves first. Failures of the recipe don't count
either, because a recipe that raises, runs out of memory or becomes unhealthy fails again, however often the run saves.
So an attempt counts as a loss if `holdfast.journal.endings` marks the reason for its end as a loss, even if its ranks
survived and saved. An attempt that was preempted before it could save counts too. The journal doesn't record that a
rank was replaced within its attempt. So such a loss counts only as long as that attempt is alive.

The journal's newest records suffice. A few dozen are read, however long the run is.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from holdfast.checkpoint import Saved
from holdfast.journal import AttemptRecord, Commit, EndingRecord, seconds_of

# The prior: one loss in one hour, with the weight of one observed loss. In 22 public recordings of spot machines and
# clusters the mean time between losses is 0.15 to 144 hours, and less than 1.2 hours in half of them.
PRIOR_LOSSES = 1.0
PRIOR_S = 3600.0

# The shortest chunk, in seconds. A boundary between two chunks costs about 0.1 s of tasks and records, mostly
# concurrent with training. This is less than 1 % of such a chunk.
FLOOR_S = 10.0
# The minimum length of a chunk, as a multiple of a save's time. It exceeds 1, because a save waits for the previous
# save, and the end of an epoch may cut a chunk to two thirds of its length.
SAVES = 1.5
# The length of a chunk while nothing is measured yet.
FIRST_STEPS = 10

# The number of newest commits that are used. Older ones are ignored, because a run, its data and its machine change.
RECENT_COMMITS = 9

Bound = Literal["least lost", "a save's length", "floor"]


# ---- the cost of saves


@dataclass(frozen=True)
class Cost:
    """The times of one commit's save and steps, in seconds.

    Attributes:
        step_s: the time of one step without a concurrent save.
        stall_s: the pause of training for the save.
        save_s: the time from the copy of the state until the commit was durable.
        restart_s: the time until the ranks began to train; 0 if unknown.
        slow_s: the time by which a save slowed concurrent steps.
    """

    step_s: float
    stall_s: float
    save_s: float
    restart_s: float
    slow_s: float = field(default=0.0, kw_only=True)

    @property
    def cost_s(self) -> float:
        """Return the training time that a save costs: the pause, and the slowing of the steps during the save."""
        return self.stall_s + self.slow_s


@dataclass(frozen=True)
class Measured(Cost):
    """Medians of several costs, because the first save of an attempt is slow, and would change a mean too much.

    Attributes:
        restart_s: 0 if no commit recorded a restart.
        count: the number of costs whose medians these are.
    """

    count: int


def cost_of(timed: Commit | Saved, steps: int) -> Cost | None:
    """Return the cost of a checkpoint that was saved after `steps` steps; None if its record has no times."""
    if not timed.train_s or steps < 1:
        return None
    step_s = (timed.train_s - timed.slow_s) / steps
    return Cost(step_s, timed.stall_s, timed.save_s, timed.restart_s, slow_s=timed.slow_s)


def measure_costs(costs: Sequence[Cost]) -> Measured | None:
    """Return the medians of the newest of these costs; None if there are no costs.

    Args:
        costs: oldest first.
    """
    newest = costs[-RECENT_COMMITS:]
    if not newest:
        return None

    def median(of: Callable[[Cost], float]) -> float:
        return statistics.median(map(of, newest))

    restarts = [cost.restart_s for cost in newest if cost.restart_s]
    return Measured(
        step_s=median(lambda cost: cost.step_s),
        stall_s=median(lambda cost: cost.stall_s),
        save_s=median(lambda cost: cost.save_s),
        restart_s=statistics.median(restarts) if restarts else 0.0,
        slow_s=median(lambda cost: cost.slow_s),
        count=len(newest),
    )


# ---- the rate of losses


@dataclass(frozen=True)
class Losses:
    """The number of losses among some attempts, and the seconds for which these attempts were alive."""

    count: int = 0
    alive_s: float = 0.0
    attempts: int = 0

    @property
    def mean_s(self) -> float:
        """Return the mean time between losses, in seconds.

        The rate of losses has a Gamma distribution: `PRIOR_LOSSES` in `PRIOR_S`, plus the observed losses and seconds.
        The result is the inverse of the mean rate, because the expected lost time of an interval is linear in the rate.
        """
        return (PRIOR_S + self.alive_s) / (PRIOR_LOSSES + self.count)

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(self.count + other.count, self.alive_s + other.alive_s, self.attempts + other.attempts)


def count_losses(attempts: Iterable[tuple[AttemptRecord, EndingRecord | None, Commit | None]]) -> Losses:
    """Count the losses among some attempts, and the seconds that these attempts were alive.

    An attempt that was found dead, or that has not ended, counts as alive until its last commit, because no record
    proves a longer life.

    Args:
        attempts: each attempt's record, with its ending and its last commit if there are any.
    """
    total = Losses()
    for record, ending, last in attempts:
        is_own = ending is not None and ending.ending.row.is_own
        ended = ending.created_at if ending and is_own else last.created_at if last else record.created_at
        alive_s = seconds_of(ended) - seconds_of(record.created_at)
        total += Losses(int(ending is not None and _is_loss(ending, last)), max(alive_s, 0.0), 1)
    return total


def _is_loss(ending: EndingRecord, last: Commit | None) -> bool:
    is_unsaved = last is not None and last.why == "chunk"  # any other commit was saved at the end of the attempt
    return ending.ending.row.is_loss or (ending.reason == "preempted" and is_unsaved)


# ---- the interval


@dataclass(frozen=True)
class Interval:
    """The chosen length of chunks.

    Attributes:
        bound: the rule that decided the length: the smallest expected loss, or a lower bound (a save's length, or the
            floor).
    """

    interval_s: float
    steps: int
    bound: Bound


def choose_interval(measured: Measured, losses: Losses) -> Interval:
    """Return the interval with the smallest expected loss of time, in whole steps."""
    bounds: list[tuple[float, Bound]] = [
        (math.sqrt(2 * measured.cost_s * losses.mean_s), "least lost"),
        (SAVES * measured.save_s, "a save's length"),
        (FLOOR_S, "floor"),
    ]
    interval_s, bound = max(bounds, key=lambda each: each[0])
    return Interval(interval_s, max(1, round(interval_s / measured.step_s)), bound)


@dataclass(frozen=True)
class Expected:
    """The fractions of a run's time that are expected to be lost, by cause.

    Attributes:
        restarts: the time in which attempts start.
        saves: training that is lost because the last save was not yet durable when the machine was lost.
        stalls: the time that saves take from training: training waits for a save, and then runs more slowly.
        redone: training since the last save, which is lost and repeated.
    """

    restarts: float
    saves: float
    stalls: float
    redone: float

    @property
    def total(self) -> float:
        return self.restarts + self.saves + self.stalls + self.redone


def expect(measured: Measured, losses: Losses, interval_s: float) -> Expected:
    """Return the fractions of time that a run is expected to lose with chunks of `interval_s` seconds."""
    mean_s = losses.mean_s
    return Expected(
        restarts=measured.restart_s / mean_s,
        saves=measured.save_s / mean_s,
        stalls=measured.cost_s / interval_s,
        redone=interval_s / (2 * mean_s),
    )
