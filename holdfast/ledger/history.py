"""A run's recorded costs and losses, to compute the length of its next chunk; see `holdfast.ledger.interval`."""

import logging
import math
import time
from collections.abc import Callable, Mapping

from holdfast.checkpoint import Saved
from holdfast.journal import AttemptRecord, Commit, EndingRecord, Journal
from holdfast.journal.reading import read_all
from holdfast.ledger.interval import (
    FIRST_STEPS,
    RECENT_COMMITS,
    Cost,
    Losses,
    choose_interval,
    cost_of,
    count_losses,
    measure_costs,
)

RECENT_ATTEMPTS = 32

log = logging.getLogger(__name__)


class CostHistory:
    """Costs and losses of a run for its live attempt: from the journal, and from this attempt's own measurements."""

    def __init__(self, journal: Journal, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            attempt: the live attempt's number; its own records are ignored.
        """
        self._costs = read_costs(journal)
        self._before = read_losses(journal, attempt)
        self._clock = clock
        self._began = clock()
        self._deaths = 0
        self._shown_steps = 0

    def note_saved(self, saved: Saved, steps: int) -> None:
        """Add the cost of a durable checkpoint that was saved after `steps` steps."""
        if cost := cost_of(saved, steps):
            self._costs = [*self._costs, cost][-RECENT_COMMITS:]

    def note_death(self) -> None:
        """Count the death of a rank as a loss; the attempt replaces the rank."""
        self._deaths += 1

    def choose_steps(self) -> int:
        """Return the number of steps for the next chunk."""
        measured = measure_costs(self._costs)
        if measured is None:
            return FIRST_STEPS
        losses = self._before + Losses(self._deaths, self._clock() - self._began, 1)
        chosen = choose_interval(measured, losses)
        if not 2 / 3 <= chosen.steps / (self._shown_steps or math.inf) <= 3 / 2:
            log.info(
                "chunks now have %d steps, about %.0f s; holdfast plan RUN shows the reason",
                chosen.steps,
                chosen.interval_s,
            )
            self._shown_steps = chosen.steps
        return chosen.steps


def read_costs(journal: Journal) -> list[Cost]:
    """Return the costs of the newest commits, oldest first."""
    newest = journal.newest_number()
    numbers = range(max(newest - RECENT_COMMITS, 0), newest + 1)
    steps = {0: 0}
    costs = []
    for commit in read_all(journal.find_commit, numbers):
        if commit is not None:
            steps[commit.number] = commit.step
            if commit.why == "adopted":  # the ranks died before they measured the cost of this save
                continue
            cost = cost_of(commit, commit.step - steps.get(commit.parent, commit.step))
            costs += [cost] if cost else []
    return costs


def read_losses(journal: Journal, before: int | None = None) -> Losses:
    """Count the newest attempts that lost their machine or processes, and the seconds that they were alive.

    Args:
        before: count only attempts with a lower number.
    """
    end = before or journal.attempts() + 1
    numbers = range(max(end - RECENT_ATTEMPTS, 1), end)
    records = read_all(journal.find_attempt, [*numbers, end])
    # An attempt's last commit is the commit from which the next attempt continues.
    lasts = list(map(_find_continued, records[1:-1]))
    lasts.append(_find_continued(records[-1]) or journal.newest_number())

    def read(number: int, last: int) -> tuple[EndingRecord | None, Commit | None]:
        commit = journal.find_commit(last)
        return journal.read_ending(number), commit if commit and commit.attempt == number else None

    ends = read_all(read, numbers, lasts)
    known = zip(records, ends, strict=False)
    return count_losses((record, *end) for record, end in known if record is not None)


def _find_continued(record: AttemptRecord | None) -> int:
    """Return the number of the last commit before an attempt began; 0 if there was none."""
    start = record.lineage.get("continues") if record else None
    number = start.get("commit") if isinstance(start, Mapping) else None
    return number if isinstance(number, int) else 0  # anybody may have written the record
