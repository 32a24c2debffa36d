"""Reading a run for a live view: a bounded number of requests first, then one listing for each poll without news.

A reader of a store sees when an attempt claims the run and ends, and each commit and quarantine. A run writes nothing
between two commits.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from holdfast.checkpoint import read_metadata
from holdfast.errors import Damage, NameMissing, RecordDamaged, RunGone, StoreDenied, WrongUse
from holdfast.extensions.watch.seen import Seen
from holdfast.journal import AttemptRecord, Commit, Journal, record_name, seconds_of
from holdfast.journal.answers import describe_unanswered
from holdfast.journal.configs import read_config
from holdfast.journal.reading import read_all
from holdfast.journal.runs import choose_runs, find_runs
from holdfast.ledger.goodput import Ledger, make_ledger
from holdfast.store import Store

RECENT_COMMITS = 12
# The number of older commits that are read for the curve of the loss, evenly spread over the run.
OLDER_COMMITS = 28
RECENT_ATTEMPTS = 6
# Each poll lists the next of these folders in turn. Commits are the most frequent records, so every second poll lists
# their folder.
TURNS = ("commits", "endings", "commits", "attempts", "commits", "quarantine", "commits", "audits")
# The goodput ledger reads every record. So the ledger is omitted for runs with more than LEDGER_COMMITS commits, and
# computed again only after LEDGER_EVERY_S seconds.
LEDGER_COMMITS = 200
LEDGER_EVERY_S = 60.0
# The number of polls between two searches of a store for new runs.
NEW_RUNS_EVERY = 5

T = TypeVar("T")


class RunReader:
    """Reads one run. Each read replaces `seen` by a new object, so that another thread may use it at any time."""

    def __init__(
        self,
        journal: Journal,
        recent: int = RECENT_COMMITS,
        older: int = OLDER_COMMITS,
        ledger_commits: int = LEDGER_COMMITS,
    ) -> None:
        """
        Args:
            recent, older: how many of the newest commits, and how many older commits, to read at most.
            ledger_commits: the largest number of commits of a run whose ledger is made.
        """
        self.journal = journal
        self.seen = Seen(journal.run, journal.store.url)
        self._recent, self._older, self._ledger_commits = recent, older, ledger_commits
        self._ledger_at = -math.inf
        self._first = 1
        self._turns = itertools.cycle(TURNS)
        self._missing: dict[str, str] = {}

    def begin(self) -> Seen:
        """Read the run for the first time. The number of requests doesn't grow with the run's length.

        Raises:
            RunUnknown: there is no such run.
            WrongUse: a later version of Holdfast wrote the run.
        """
        try:
            record = self.journal.read_run()
            self.seen, self._first = replace(self.seen, recipe=record.recipe), record.first_commit
        except Damage as error:
            self._missing["run.json"] = str(error)
        newest = self.journal.newest_number()
        self._find_lost(newest)
        self._add_commits(self._choose(newest))
        self.seen = replace(self.seen, newest=newest)
        self._read_quarantine()
        self._read_audits()
        self._read_attempts(max(0, self.journal.attempts() - RECENT_ATTEMPTS))
        self._describe()
        return self.seen

    def _find_lost(self, newest: int) -> None:
        """Note the newest commit and attempt that other records name but whose own records are missing."""
        latest = self.journal.read_latest()
        attempts, last = self.journal.attempts(), max(self.journal.numbers("endings"), default=0)
        named = {"commits": (newest, latest.commit if latest else 0), "attempts": (attempts, last)}
        for folder, (highest, number) in named.items():
            if number > highest:
                name = record_name(folder, number)
                self._missing[name] = f"{name} is missing"

    def poll(self) -> bool:
        """Check for new records with one listing, and read them all. Return whether there were new records.

        Raises:
            RunGone: the run was moved or deleted.
            StoreError: the store can't be reached.
        """
        has_news = {
            "commits": self._find_commits, "endings": self._read_endings, "attempts": self._find_attempts,
            "quarantine": self._read_quarantine, "audits": self._read_audits,
        }[next(self._turns)]()  # fmt: skip
        if has_news:
            for find in (self._find_commits, self._find_attempts, self._read_endings, self._read_quarantine):
                find()
            self._read_audits()
            self._describe()
        return has_news

    # ---- commits

    def _choose(self, newest: int) -> list[int]:
        """Return the numbers of the newest commits, and of older commits at equal distances."""
        first = max(self._first, newest - self._recent + 1)
        count = max(0, first - self._first)
        older = range(self._first, first, max(1, -(-count // max(1, self._older)))) if self._older else range(0)
        return [*older, *range(first, newest + 1)]

    def _find_commits(self) -> bool:
        newest = self.seen.newest
        # The listing includes the newest known number. If that record is missing, the folder was deleted.
        found = self.journal.numbers("commits", after=newest - 1 if newest > 1 else 0)
        if newest and newest not in found and not self.journal.exists():
            raise RunGone(f"the run's folder {self.journal.store.url} is gone: it was moved or deleted")
        new = [number for number in found if number > newest]
        if new:
            self._add_commits(new[-self._recent :])
            self.seen = replace(self.seen, newest=new[-1], sign_at=time.monotonic())
        return bool(new)

    def _add_commits(self, numbers: list[int]) -> None:
        read = {commit.number: commit for commit in read_all(self._read_commit, numbers) if commit}
        known = {commit.number: commit for commit in self.seen.commits} | read
        self.seen = replace(self.seen, commits=tuple(known[number] for number in sorted(known)))

    def _read_commit(self, number: int) -> Commit | None:
        return self._read(record_name("commits", number), lambda: self.journal.read_commit(number))

    # ---- attempts

    def _find_attempts(self) -> bool:
        before = self.seen.last_attempt
        new = self.journal.numbers("attempts", after=before)
        if new:
            self._read_attempts(before)
            self.seen = replace(self.seen, sign_at=time.monotonic())
        return bool(new)

    def _read_attempts(self, after: int) -> None:
        numbers = self.journal.numbers("attempts", after=after)[-RECENT_ATTEMPTS:]
        read = tuple((number, self._read_attempt(number)) for number in numbers)
        self.seen = replace(self.seen, attempts=(*self.seen.attempts, *read)[-RECENT_ATTEMPTS:])
        self._read_endings()

    def _read_attempt(self, number: int) -> AttemptRecord | None:
        return self._read(record_name("attempts", number), lambda: self.journal.read_attempt(number))

    def _read_endings(self) -> bool:
        """Read the new endings of the attempts that the view shows. Return whether there were new endings."""
        known = {ending.number for ending in self.seen.endings}
        open_ = [number for number, _ in self.seen.attempts if number not in known]
        if not open_:
            return False
        listed = {*self.journal.numbers("endings", after=open_[0] - 1)}
        new = [found for number in open_ if number in listed and (found := self.journal.read_ending(number))]
        if new:
            endings = sorted((*self.seen.endings, *new), key=lambda ending: ending.number)
            self.seen = replace(self.seen, endings=tuple(endings[-RECENT_ATTEMPTS:]))
        return bool(new)

    # ---- the rest

    def _read_quarantine(self) -> bool:
        found = tuple(self.journal.numbers("quarantine"))
        has_news = found != self.seen.quarantined
        self.seen = replace(self.seen, quarantined=found)
        return has_news

    def _read_audits(self) -> bool:
        """Read the verdicts that nobody has answered. Without audits, that costs one listing."""
        found = tuple(describe_unanswered(self.journal))
        has_news = found != self.seen.unanswered
        self.seen = replace(self.seen, unanswered=found)
        return has_news

    def _describe(self) -> None:
        """Compute the run's length and the last step of its next chunk from the newest commit and the settings."""
        head, config = self.seen.head, read_config(self.journal)
        metadata = None
        if head is not None:
            metadata = self._read(f"{head.path}/metadata.json", lambda: read_metadata(self.journal.store, head.path))
            if metadata is None and not self.journal.is_pruned(head.number):
                self._missing.setdefault(f"{head.path}/metadata.json", f"{head.path}/metadata.json is missing")
        step = head.step if head else 0
        stop = None
        if config is not None and not config.chunk.is_auto and metadata is not None:
            stop = config.next_stop(step, metadata.steps_per_epoch, 1)
        epochs = config.epochs if config else self.journal.read_epochs()
        self.seen = replace(
            self.seen, metadata=metadata or self.seen.metadata, epochs=epochs, next_stop=stop,
            sign_at=self.seen.sign_at or self._find_sign(), ledger=self._make_ledger(),
            # threads add the entries in any order
            missing=tuple(self._missing[name] for name in sorted(self._missing)),
        )  # fmt: skip

    def _make_ledger(self) -> Ledger | None:
        is_due = time.monotonic() - self._ledger_at > LEDGER_EVERY_S or self.seen.is_complete
        if self.seen.newest > self._ledger_commits or not is_due:
            return self.seen.ledger
        self._ledger_at = time.monotonic()
        with contextlib.suppress(WrongUse, RecordDamaged):  # no record of an attempt is left
            return make_ledger(self.journal)
        return None

    def _find_sign(self) -> float:
        """Return the recorded time of the newest commit or claim, converted to this machine's monotonic clock."""
        last = self.seen.attempts[-1][1] if self.seen.attempts else None
        times = [record.created_at for record in (self.seen.head, last) if record is not None]
        ages = [time.time() - seconds_of(each) for each in times]
        return time.monotonic() - max(0.0, min(ages, default=0.0))

    def _read(self, name: str, read: Callable[[], T]) -> T | None:
        """Return a record. If it is lost or damaged, note the loss and return None."""
        try:
            found = read()
        except NameMissing:
            self._missing[name] = f"{name} is missing"
            return None
        except Damage as error:
            self._missing[name] = str(error)
            return None
        self._missing.pop(name, None)
        return found


class StoreReader:
    """Reads the runs of a store. Each poll lists every run once; some polls also list the store.

    Attributes:
        note: a text that says which runs of the store are read; empty if all runs are read.
    """

    def __init__(self, store: Store, most: int | None = None) -> None:
        """
        Args:
            most: read only this many runs, the newest ones, and all runs that begin later.
        """
        self.store, self.note = store, ""
        self._most = most
        self._left_out: frozenset[str] = frozenset()
        self._readers: dict[str, RunReader] = {}
        self._problems: dict[str, Seen] = {}
        self._count = 0

    @property
    def seen(self) -> list[Seen]:
        """The runs in order of their names."""
        found = {run: reader.seen for run, reader in self._readers.items()} | self._problems
        return [found[run] for run in sorted(found)]

    def begin(self) -> list[Seen]:
        """Find the store's runs, and read each run for the first time."""
        chosen = choose_runs(self.store, self._most)
        self.note, self._left_out = chosen.note, chosen.left_out
        self._add(chosen.journals)
        return self.seen

    def _find_new(self) -> bool:
        """Look for new runs. Names that are already known are not checked again."""
        known = {*self._readers, *self._problems, *self._left_out}
        return self._add(find_runs(self.store, [name for name in self.store.list() if name not in known]))

    def _add(self, journals: Iterable[Journal]) -> bool:
        new = [RunReader(journal, recent=2, older=16, ledger_commits=0) for journal in journals]
        for reader, problem in zip(new, read_all(_try_begin, new), strict=True):
            run = reader.journal.run
            if problem:  # one run that can't be read must not hide the others
                self._problems[run] = Seen(run, problem=problem)
            else:
                self._readers[run] = reader
        return bool(new)

    def poll(self) -> bool:
        """Check for new records of each run; see `RunReader.poll`."""
        self._count += 1
        readers = [*self._readers.items()]
        news = [False]
        for (run, _), answer in zip(readers, read_all(_try_poll, [reader for _, reader in readers]), strict=True):
            if isinstance(answer, RunGone):
                del self._readers[run]
                self._problems[run] = Seen(run, problem=str(answer))
            news.append(bool(answer))
        if self._count % NEW_RUNS_EVERY == 0:
            news.append(self._find_new())
        return any(news)


def _try_begin(reader: RunReader) -> str:
    """Read a run for the first time. Return the reason if it can't be read, else an empty text."""
    try:
        reader.begin()
    except (Damage, StoreDenied, WrongUse) as error:
        return str(error)
    return ""


def _try_poll(reader: RunReader) -> bool | RunGone:
    try:
        return reader.poll()
    except RunGone as error:
        return error
