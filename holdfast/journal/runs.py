"""The runs of a store: all runs, or the newest if there are very many. The number of parallel requests is bounded."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.errors import NameMissing, StoreDenied, Unreadable
from holdfast.journal.journal import Journal
from holdfast.journal.reading import read_all
from holdfast.store import Store

# The time of a run's last write costs a request on an object store, and 1,000 requests take some seconds. For more runs
# than this no times are requested.
MOST_ASKED = 1000
# The largest number of runs in a list, an index or a view, unless the user asks for more.
MOST_SHOWN = 100

log = logging.getLogger(__name__)


def find_runs(store: Store, names: Iterable[str] | None = None) -> Iterator[Journal]:
    """Yield the journals of a store's runs, in order of their names.

    A folder that can't be read is yielded, too, because it may be a run. A caller that reads the folder gets the error,
    and can continue with the next run.

    Args:
        names: the names to check; by default all names in the store.
    """
    journals = [Journal(store, name) for name in (_list_names(store) if names is None else names)]
    are_runs = read_all(_may_be_run, journals)
    yield from (journal for journal, is_run in zip(journals, are_runs, strict=True) if is_run)


def _list_names(store: Store) -> list[str]:
    """Return the names at a store's top level that may be names of runs. A run's name begins with a letter or a digit.

    A folder such as ``_machines`` has records that don't belong to a run.
    """
    return [name for name in store.list() if not name.startswith("_")]


def _may_be_run(journal: Journal) -> bool:
    with contextlib.suppress(StoreDenied, Unreadable):
        return journal.exists()
    return True


@dataclass(frozen=True)
class ChosenRuns:
    """The runs chosen from a store, for a page or a list that has to stay short.

    Attributes:
        journals: the journals of the chosen runs, in order of their names if all runs were chosen, otherwise newest
            first.
        left_out: the names that were not chosen. Some of them may not be runs.
        is_by_name: whether the runs with the last names in sorted order were chosen instead of the newest runs.
    """

    journals: list[Journal]
    left_out: frozenset[str] = frozenset()
    is_by_name: bool = False

    @property
    def count(self) -> int:
        """Return the number of names, chosen or not."""
        return len(self.journals) + len(self.left_out)

    @property
    def note(self) -> str:
        """Return a text that says which runs were chosen; empty if all were."""
        if not self.left_out:
            return ""
        which = "the last by name" if self.is_by_name else "the newest"
        return f"{len(self.journals):,} of {self.count:,} runs, {which}"


def choose_runs(store: Store, most: int | None) -> ChosenRuns:
    """Return all of a store's runs, or the newest if there are more than `most`. With None, return all.

    A run is as new as its last commit. On an object store that time costs a request for each run. So if an object store
    has more than `MOST_ASKED` runs, the last runs in order of their names are chosen instead of the newest.
    """
    names = _list_names(store)
    if most is None or len(names) <= most:
        return ChosenRuns([*find_runs(store, names)])
    if not store.is_disk and len(names) > MOST_ASKED:
        chosen = _find_last(store, names, most)
        left_out = frozenset(names) - {journal.run for journal in chosen}
        return ChosenRuns(chosen, left_out, is_by_name=True)
    journals = [Journal(store, name) for name in names]
    timed = [(at, journal) for journal, at in zip(journals, read_all(_find_time, journals), strict=True) if at]
    timed.sort(key=lambda each: each[0], reverse=True)
    return ChosenRuns([journal for _, journal in timed[:most]], frozenset(journal.run for _, journal in timed[most:]))


def _find_last(store: Store, names: Sequence[str], most: int) -> list[Journal]:
    """Return the last runs in order of their names, the last name first."""
    found: list[Journal] = []
    end = len(names)
    while len(found) < most and end > 0:
        start = max(0, end - (most - len(found)))
        found += reversed([*find_runs(store, names[start:end])])
        end = start
    return found


def _find_time(journal: Journal) -> datetime | None:
    """Return the time of a run's last write; the earliest time if it can't be read; None if this isn't a run."""
    with contextlib.suppress(StoreDenied, Unreadable):
        for name in ("latest.json", "run.json"):
            with contextlib.suppress(NameMissing):
                return journal.store.modified(name)
        return None
    return datetime.min.replace(tzinfo=UTC)


def list_runs(store: Store) -> list[Journal]:
    """Return the journals of a store's runs, in order of their names; log a warning if there are none."""
    journals = list(find_runs(store))
    if not journals:
        log.warning("there are no runs in %s", store.url)
    return journals
