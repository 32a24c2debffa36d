"""How long a chunk should be, from what saves cost and how often the machine is lost.

A save stalls training for ``c`` seconds, and a loss costs what was trained since the last one: half an interval ``T``,
on average. With ``M`` seconds between losses, the share ``c/T + T/2M`` of the time is lost, which is least with
``T = sqrt(2cM)``. That a save is durable ``d`` seconds later, and a restart of ``R``, add ``(R + d)/M``, whatever the
interval is. Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.

Only losses without an announcement count: an attempt that was told to end has saved. And only losses count that another
machine would not have had: a recipe that raises, runs out of memory or becomes unhealthy does so again, however often
it is saved. So an attempt is a loss if its reason is one (`holdfast.endings`), even if its ranks lived on and saved
themselves, or if it was preempted and had not saved in time. A rank that died and was replaced within its attempt is in
no record: it counts while that attempt lives.

All of it is read from the journal's newest records, a few dozen, however many there are.
"""

# Over 300 lines, of which 16 explain the formula: costs and losses are measured for this one decision.

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from holdfast.checkpoint import Saved
from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import AttemptRecord, Commit, EndingRecord, Journal

# What is believed before anything is seen: one loss in an hour, with the weight of one that was seen. In 22 public
# recordings of spot machines and clusters there is one in 0.15 to 144 hours; half of them have one in less than 1.2.
PRIOR_LOSSES = 1.0
PRIOR_S = 3600.0

# A boundary between two chunks costs some 0.1 s of tasks and records, mostly beside the training: so it is below 1 %.
FLOOR_S = 10.0
# The next save waits for the one before; and the end of an epoch may leave a chunk two thirds of its length.
SAVES = 1.5
# Before anything is measured.
FIRST_STEPS = 10

RECENT_COMMITS = 9
RECENT_ATTEMPTS = 32
READERS = 8

Bound = Literal["least lost", "a save's length", "floor"]
T = TypeVar("T")

log = logging.getLogger(__name__)


# ---- what saves cost


@dataclass(frozen=True)
class Cost:
    """What one commit's save and steps took."""

    step_s: float
    stall_s: float
    save_s: float
    restart_s: float


@dataclass(frozen=True)
class Measured(Cost):
    """The medians of several, which the first of an attempt, cold and urgent, doesn't move.

    Attributes:
        restart_s: 0 where nobody knows.
        count: of how many.
    """

    count: int


def cost_of(timed: Commit | Saved, steps: int) -> Cost | None:
    """What a checkpoint of so many steps took; None where that isn't on record."""
    if not timed.train_s or steps < 1:
        return None
    return Cost(timed.train_s / steps, timed.stall_s, timed.save_s, timed.restart_s)


def measure(costs: Sequence[Cost]) -> Measured | None:
    """What a save and a step take now, of the newest of these costs, oldest first; None for none."""
    newest = costs[-RECENT_COMMITS:]
    if not newest:
        return None

    def middle(of: Callable[[Cost], float]) -> float:
        return statistics.median(map(of, newest))

    restarts = [cost.restart_s for cost in newest if cost.restart_s]
    return Measured(
        step_s=middle(lambda cost: cost.step_s),
        stall_s=middle(lambda cost: cost.stall_s),
        save_s=middle(lambda cost: cost.save_s),
        restart_s=statistics.median(restarts) if restarts else 0.0,
        count=len(newest),
    )


# ---- how often the machine is lost


@dataclass(frozen=True)
class Losses:
    """So many losses in so many seconds in which attempts were alive."""

    count: int = 0
    alive_s: float = 0.0
    attempts: int = 0

    @property
    def mean_s(self) -> float:
        """The mean time between losses.

        The rate of losses has a Gamma distribution of `PRIOR_LOSSES` in `PRIOR_S` before anything is seen, and of what
        was seen on top of that afterwards. The inverse of its mean is taken: what an interval is expected to lose is
        linear in the rate.
        """
        return (PRIOR_S + self.alive_s) / (PRIOR_LOSSES + self.count)

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(self.count + other.count, self.alive_s + other.alive_s, self.attempts + other.attempts)


def count_losses(attempts: Iterable[tuple[AttemptRecord, EndingRecord | None, Commit | None]]) -> Losses:
    """What became of some attempts.

    One that was found dead, or has not ended, was alive until its last commit at least; more nobody knows.

    Args:
        attempts: each with its ending and its last commit, if there are any.
    """
    total = Losses()
    for record, ending, last in attempts:
        is_own = ending is not None and ending.ending.row.is_own
        ended = ending.created_at if ending and is_own else last.created_at if last else record.created_at
        alive_s = _time(ended) - _time(record.created_at)
        total += Losses(int(ending is not None and _is_loss(ending, last)), max(alive_s, 0.0), 1)
    return total


def _is_loss(ending: EndingRecord, last: Commit | None) -> bool:
    is_unsaved = last is not None and last.why == "chunk"  # otherwise the last is what it has saved, or has adopted
    return ending.ending.row.is_loss or (ending.reason == "preempted" and is_unsaved)


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ---- the interval


@dataclass(frozen=True)
class Interval:
    """How long chunks should be.

    Attributes:
        bound: what has decided: that the least is lost, or that it can't be shorter than a save or the floor.
    """

    interval_s: float
    steps: int
    bound: Bound


def choose_interval(measured: Measured, losses: Losses) -> Interval:
    """The interval that is expected to lose least, in whole steps."""
    bounds: list[tuple[float, Bound]] = [
        (math.sqrt(2 * measured.stall_s * losses.mean_s), "least lost"),
        (SAVES * measured.save_s, "a save's length"),
        (FLOOR_S, "floor"),
    ]
    interval_s, bound = max(bounds, key=lambda each: each[0])
    return Interval(interval_s, max(1, round(interval_s / measured.step_s)), bound)


@dataclass(frozen=True)
class Expected:
    """The shares of the time that are expected to be lost.

    Attributes:
        restarts: to beginning again.
        saves: to what was trained, and lost, while the last save wasn't durable yet.
        stalls: to standing still for a save.
        redone: to what was trained, and lost, since the last save.
    """

    restarts: float
    saves: float
    stalls: float
    redone: float

    @property
    def total(self) -> float:
        return self.restarts + self.saves + self.stalls + self.redone


def expect(measured: Measured, losses: Losses, interval_s: float) -> Expected:
    """What is expected to be lost with chunks of so many seconds."""
    mean_s = losses.mean_s
    return Expected(
        restarts=measured.restart_s / mean_s,
        saves=measured.save_s / mean_s,
        stalls=measured.stall_s / interval_s,
        redone=interval_s / (2 * mean_s),
    )


# ---- while an attempt lives


class History:
    """What an attempt knows of its run's saves and losses: what the journal says, and what has happened since."""

    def __init__(self, journal: Journal, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            attempt: its number; what is on record of it doesn't count.
        """
        self._costs = read_costs(journal)
        self._before = read_losses(journal, attempt)
        self._clock = clock
        self._began = clock()
        self._deaths = 0
        self._shown_steps = 0

    def note_saved(self, saved: Saved, steps: int) -> None:
        """A checkpoint of so many steps is durable."""
        if cost := cost_of(saved, steps):
            self._costs = [*self._costs, cost][-RECENT_COMMITS:]

    def note_death(self) -> None:
        """A rank has died, and is replaced."""
        self._deaths += 1

    def choose_steps(self) -> int:
        """How many steps the next chunk should have."""
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
    """What the newest commits took, oldest first."""
    newest = journal.newest_number()
    numbers = range(max(newest - RECENT_COMMITS, 0), newest + 1)
    steps = {0: 0}
    costs = []
    for commit in _read_all(lambda number: _find(journal.read_commit, number), numbers):
        if commit is not None:
            steps[commit.number] = commit.step
            cost = cost_of(commit, commit.step - steps.get(commit.parent, commit.step))
            costs += [cost] if cost else []
    return costs


def read_losses(journal: Journal, before: int | None = None) -> Losses:
    """What became of the newest attempts.

    Args:
        before: only of those with a lower number.
    """
    end = before or journal.attempts() + 1
    numbers = range(max(end - RECENT_ATTEMPTS, 1), end)
    records = _read_all(lambda number: _find(journal.read_attempt, number), [*numbers, end])
    # The last commit of an attempt is the one that the next continues from.
    lasts = [_continued(record) for record in records[1:-1]] + [_continued(records[-1]) or journal.newest_number()]

    def read(number: int, last: int) -> tuple[EndingRecord | None, Commit | None]:
        commit = _find(journal.read_commit, last)
        return journal.read_ending(number), commit if commit and commit.attempt == number else None

    ends = _read_all(read, numbers, lasts)
    known = zip(records, ends, strict=False)
    return count_losses((record, *end) for record, end in known if record is not None)


def _continued(record: AttemptRecord | None) -> int:
    """The last commit before an attempt began; 0 for none."""
    return int(record.lineage.get("continues", {}).get("commit", 0)) if record else 0


def _find(read: Callable[[int], T], number: int) -> T | None:
    with contextlib.suppress(NameMissing, RecordDamaged):
        return read(number) if number else None
    return None


def _read_all(read: Callable[..., T], *numbers: Iterable[int]) -> list[T]:
    """Several at once: a store may be far away, and an attempt that begins has no time to lose."""
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(read, *numbers))
