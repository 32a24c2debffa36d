"""The best length of a chunk, computed from the cost of saves and the rate at which machines are lost.

A save stalls training for ``c`` seconds. A loss costs the training since the last save: half an interval ``T`` on
average. With ``M`` seconds between losses, the share ``c/T + T/2M`` of the time is lost, which is least at
``T = sqrt(2cM)``. A save that is durable ``d`` seconds later and a restart of ``R`` seconds add ``(R + d)/M``, whatever
the interval. Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.

Announced losses don't count, because an attempt that is told to end saves first. Failures of the recipe don't count
either: a recipe that raises, runs out of memory or becomes unhealthy does so again, however often the run saves. So an
attempt counts as a loss if `holdfast.endings` marks its reason as one, even if its ranks survived and saved. An attempt
that was preempted before it could save counts too. The journal doesn't record a rank that was replaced within its
attempt: such a loss counts only while that attempt lives.

The journal's newest records suffice: this module reads a few dozen, however long the run is.
"""

# Over 300 lines: the model of costs and losses, and the functions that read both from the journal.

# This file has over 300 lines, of which 16 explain the formula. Costs and losses are measured for this one decision.

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from holdfast.checkpoint import Saved
from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import AttemptRecord, Commit, EndingRecord, Journal
from holdfast.journal.reading import read_all

# The prior: one loss in one hour, with the weight of one observed loss. In 22 public recordings of spot machines and
# clusters the mean time between losses is 0.15 to 144 hours, and less than 1.2 hours in half of them.
PRIOR_LOSSES = 1.0
PRIOR_S = 3600.0

# A boundary between two chunks costs some 0.1 s of tasks and records, mostly beside the training: below 1 % of this.
FLOOR_S = 10.0
# A save waits for the one before, and the end of an epoch may cut a chunk to two thirds of its length.
SAVES = 1.5
# The length of a chunk while nothing is measured yet.
FIRST_STEPS = 10

RECENT_COMMITS = 9
RECENT_ATTEMPTS = 32

Bound = Literal["least lost", "a save's length", "floor"]
T = TypeVar("T")

log = logging.getLogger(__name__)


# ---- the cost of saves


@dataclass(frozen=True)
class Cost:
    """Seconds that one commit's save and steps took."""

    step_s: float
    stall_s: float
    save_s: float
    restart_s: float


@dataclass(frozen=True)
class Measured(Cost):
    """Medians of several costs. An attempt's first save, which is slow because it is cold, hardly moves them.

    Attributes:
        restart_s: 0 if no commit recorded a restart.
        count: the number of costs.
    """

    count: int


def cost_of(timed: Commit | Saved, steps: int) -> Cost | None:
    """Return the cost of a checkpoint that was saved after `steps` steps; None if its record has no times."""
    if not timed.train_s or steps < 1:
        return None
    return Cost(timed.train_s / steps, timed.stall_s, timed.save_s, timed.restart_s)


def measure(costs: Sequence[Cost]) -> Measured | None:
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
        count=len(newest),
    )


# ---- the rate of losses


@dataclass(frozen=True)
class Losses:
    """The number of losses among some attempts, with the seconds that these attempts lived."""

    count: int = 0
    alive_s: float = 0.0
    attempts: int = 0

    @property
    def mean_s(self) -> float:
        """Return the mean time between losses, in seconds.

        The rate of losses has a Gamma distribution: `PRIOR_LOSSES` in `PRIOR_S`, plus the observed losses and seconds.
        This is the inverse of its mean, because the expected loss of an interval is linear in the rate.
        """
        return (PRIOR_S + self.alive_s) / (PRIOR_LOSSES + self.count)

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(self.count + other.count, self.alive_s + other.alive_s, self.attempts + other.attempts)


def count_losses(attempts: Iterable[tuple[AttemptRecord, EndingRecord | None, Commit | None]]) -> Losses:
    """Count the losses among some attempts, and the seconds that these were alive.

    An attempt that was found dead, or that has not ended, counts as alive until its last commit: no record proves more.

    Args:
        attempts: each attempt's record, with its ending and its last commit if there are any.
    """
    total = Losses()
    for record, ending, last in attempts:
        is_own = ending is not None and ending.ending.row.is_own
        ended = ending.created_at if ending and is_own else last.created_at if last else record.created_at
        alive_s = _seconds_of(ended) - _seconds_of(record.created_at)
        total += Losses(int(ending is not None and _is_loss(ending, last)), max(alive_s, 0.0), 1)
    return total


def _is_loss(ending: EndingRecord, last: Commit | None) -> bool:
    is_unsaved = last is not None and last.why == "chunk"  # any other reason: it saved when told to end, or adopted
    return ending.ending.row.is_loss or (ending.reason == "preempted" and is_unsaved)


def _seconds_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ---- the interval


@dataclass(frozen=True)
class Interval:
    """The chosen length of chunks.

    Attributes:
        bound: the rule that decided: the least expected loss, or a lower bound (the length of a save, the floor).
    """

    interval_s: float
    steps: int
    bound: Bound


def choose_interval(measured: Measured, losses: Losses) -> Interval:
    """Return the interval with the least expected loss, in whole steps."""
    bounds: list[tuple[float, Bound]] = [
        (math.sqrt(2 * measured.stall_s * losses.mean_s), "least lost"),
        (SAVES * measured.save_s, "a save's length"),
        (FLOOR_S, "floor"),
    ]
    interval_s, bound = max(bounds, key=lambda each: each[0])
    return Interval(interval_s, max(1, round(interval_s / measured.step_s)), bound)


@dataclass(frozen=True)
class Expected:
    """The expected losses, as shares of the time.

    Attributes:
        restarts: the time in which attempts start.
        saves: training that is lost because the last save was not durable yet.
        stalls: the time in which training waits for a save.
        redone: training since the last save, which is lost and done again.
    """

    restarts: float
    saves: float
    stalls: float
    redone: float

    @property
    def total(self) -> float:
        return self.restarts + self.saves + self.stalls + self.redone


def expect(measured: Measured, losses: Losses, interval_s: float) -> Expected:
    """Return the expected losses with chunks of `interval_s` seconds."""
    mean_s = losses.mean_s
    return Expected(
        restarts=measured.restart_s / mean_s,
        saves=measured.save_s / mean_s,
        stalls=measured.stall_s / interval_s,
        redone=interval_s / (2 * mean_s),
    )


# ---- while an attempt lives


class History:
    """Costs and losses of a run as its live attempt knows them: from the journal, and from this attempt itself."""

    def __init__(self, journal: Journal, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            attempt: the live attempt's number; its own records don't count.
        """
        self._costs = read_costs(journal)
        self._before = read_losses(journal, attempt)
        self._clock = clock
        self._began = clock()
        self._deaths = 0
        self._shown_steps = 0

    def note_saved(self, saved: Saved, steps: int) -> None:
        """Add the cost of a checkpoint that is durable now, and that was saved after `steps` steps."""
        if cost := cost_of(saved, steps):
            self._costs = [*self._costs, cost][-RECENT_COMMITS:]

    def note_death(self) -> None:
        """Count the death of a rank that is replaced."""
        self._deaths += 1

    def choose_steps(self) -> int:
        """Return the number of steps for the next chunk."""
        measured = measure(self._costs)
        if measured is None:
            return FIRST_STEPS
        losses = self._before + Losses(self._deaths, self._clock() - self._began, 1)
        chosen = choose_interval(measured, losses)
        if not 2 / 3 <= chosen.steps / (self._shown_steps or math.inf) <= 3 / 2:
            log.info("chunks of %d steps, or %.0f s: holdfast plan has the reasons", chosen.steps, chosen.interval_s)
            self._shown_steps = chosen.steps
        return chosen.steps


# ---- from the journal


def read_costs(journal: Journal) -> list[Cost]:
    """Return the costs of the newest commits, oldest first."""
    newest = journal.newest_number()
    numbers = range(max(newest - RECENT_COMMITS, 0), newest + 1)
    steps = {0: 0}
    costs = []
    for commit in read_all(lambda number: _read_if_good(journal.read_commit, number), numbers):
        if commit is not None:
            steps[commit.number] = commit.step
            if commit.why == "adopted":  # nobody was left to measure what its save cost
                continue
            cost = cost_of(commit, commit.step - steps.get(commit.parent, commit.step))
            costs += [cost] if cost else []
    return costs


def read_losses(journal: Journal, before: int | None = None) -> Losses:
    """Count the losses among the newest attempts.

    Args:
        before: count only attempts with a lower number.
    """
    end = before or journal.attempts() + 1
    numbers = range(max(end - RECENT_ATTEMPTS, 1), end)
    records = read_all(lambda number: _read_if_good(journal.read_attempt, number), [*numbers, end])
    # An attempt's last commit is the one from which the next attempt continues.
    lasts = list(map(_find_continued, records[1:-1]))
    lasts.append(_find_continued(records[-1]) or journal.newest_number())

    def read(number: int, last: int) -> tuple[EndingRecord | None, Commit | None]:
        commit = _read_if_good(journal.read_commit, last)
        return journal.read_ending(number), commit if commit and commit.attempt == number else None

    ends = read_all(read, numbers, lasts)
    known = zip(records, ends, strict=False)
    return count_losses((record, *end) for record, end in known if record is not None)


def _find_continued(record: AttemptRecord | None) -> int:
    """Return the number of the last commit before an attempt began; 0 if there was none."""
    return int(record.lineage.get("continues", {}).get("commit", 0)) if record else 0


def _read_if_good(read: Callable[[int], T], number: int) -> T | None:
    """Return a record; None if it is missing or damaged, or if its number is 0."""
    with contextlib.suppress(NameMissing, RecordDamaged):
        return read(number) if number else None
    return None
