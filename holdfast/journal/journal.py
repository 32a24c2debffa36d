"""Who may write a run, and which checkpoints count.

A run's folder has numbered records, each created once and never changed: ``attempts/`` (who claimed the right to
write), ``commits/`` (which checkpoints count; each names its parent), ``quarantine/`` (which commits are not to be
used again) and ``pruned/`` (whose checkpoints were given up). They are the truth. ``latest.json`` is a hint where to
begin to read them, so that finding the newest costs the same however many there are.
"""

# Over 300 lines: one class, so that every rule of who may write and what counts stands in one place.

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterator
from typing import Any

from holdfast import faults
from holdfast.endings import Ending
from holdfast.errors import NameMissing, NameTaken, RecordDamaged, RunGone, Superseded, WrongUse
from holdfast.journal.folder import RunFolder
from holdfast.journal.links import broken_links
from holdfast.journal.records import (
    MAX_RECORD_BYTES,
    AttemptRecord,
    Commit,
    EndingRecord,
    Latest,
    Pin,
    Quarantine,
    metrics_name,
    now,
    read_record,
    record_name,
    signature_name,
)
from holdfast.store import Store

log = logging.getLogger(__name__)


class Journal(RunFolder):
    """The records of one run, on the store that holds its folder."""

    def __init__(self, store: Store, run: str) -> None:
        super().__init__(store, run)
        self._commits: dict[int, Commit] = {}  # a record never changes
        self._reached: dict[str, int] | None = None  # the highest numbers that are known; more may have come since

    # ---- attempts: who may write

    def attempts(self) -> int:
        """The highest attempt number claimed; 0 for none."""
        return self._find_highest("attempts")

    def has_attempt(self, number: int) -> bool:
        """Whether the number was claimed."""
        return self.store.exists(record_name("attempts", number))

    def read_attempt(self, number: int) -> AttemptRecord:
        """One attempt's record."""
        return read_record(self.store, AttemptRecord, record_name("attempts", number))

    def claim_attempt(
        self,
        number: int,
        why: str,
        host: str,
        pid: int,
        environment: dict[str, Any],
        lineage: dict[str, Any] | None = None,
    ) -> AttemptRecord:
        """Claim attempt ``number`` for this process, and for no other; every lower one is superseded.

        The record has a token of its writer: a claim whose answer was lost is then known as our own.

        Raises:
            Superseded: the number is taken.
        """
        record = AttemptRecord(
            number=number,
            why=why,
            created_at=now(),
            host=host,
            pid=pid,
            writer=secrets.token_hex(16),
            environment=environment,
            lineage=lineage or {},
        )
        try:
            self.store.create(record_name("attempts", number), record.to_bytes())
        except NameTaken:
            raise Superseded(
                f"attempt {number} of run {self.run!r} was claimed by another process a moment ago",
                hint="that process trains this run",
                attempt=number,
            ) from None
        return record

    def end_attempt(self, number: int, ending: Ending) -> Ending:
        """Record how an attempt ended; return what is on record, which is the first ending that was recorded."""
        record = EndingRecord(number=number, created_at=now(), **vars(ending))
        try:
            self.store.create(record_name("endings", number), record.to_bytes())
        except NameTaken:
            known = self.read_ending(number)
            return known.ending if known else ending
        return ending

    def read_ending(self, number: int) -> EndingRecord | None:
        """Return the record of how an attempt ended; None while it lives, and where nobody has recorded it."""
        try:
            return read_record(self.store, EndingRecord, record_name("endings", number))
        except NameMissing:
            return None
        except RecordDamaged as error:
            self.warn(str(error))
            return None

    def endings(self) -> list[Ending]:
        """Return how the attempts ended, by number."""
        found = map(self.read_ending, self.numbers("endings"))
        return [record.ending for record in found if record is not None]

    def check_fence(self, attempt: int) -> None:
        """Return if the run is there and no later attempt has claimed it.

        One request tells both, as long as the attempt's own record is there.

        Raises:
            RunGone: the run was moved or deleted.
            Superseded: a later attempt has claimed it.
        """
        claimed = self.numbers("attempts", after=attempt - 1)
        if attempt not in claimed and not self.exists():
            raise RunGone.of(self.store.url)
        highest = max(claimed, default=0)
        if highest <= attempt:
            return
        raise Superseded(
            f"attempt {attempt} of run {self.run!r} is superseded by attempt {highest}",
            hint="another process trains this run; nothing that it committed was touched",
            attempt=attempt,
            by=highest,
        )

    # ---- commits: what counts

    def read_latest(self) -> Latest | None:
        """latest.json; None where it is missing or can't be read."""
        try:
            return read_record(self.store, Latest, "latest.json")
        except NameMissing:
            return None
        except RecordDamaged as error:
            self.warn(f"{error}; the commits are listed instead")
            return None

    def newest_number(self) -> int:
        """The number of the newest commit, quarantined or not; 0 for none."""
        return self._find_highest("commits")

    def _find_highest(self, folder: str) -> int:
        """Return the highest number in a folder; latest.json, read once, says from where on to look."""
        if self._reached is None:
            latest = self.read_latest()
            self._reached = {"attempts": latest.attempt, "commits": latest.commit} if latest else {}
        self._reached[folder] = self.highest(folder, self._reached.get(folder, 0))
        return self._reached[folder]

    def next_number(self) -> int:
        """The number that the next commit gets: no record speaks of it, not even of a commit that was lost."""
        newest = self.newest_number()
        number = max(newest, *self.numbers("quarantine", after=newest), 0) + 1
        while self.is_pruned(number):
            number += 1
        return number

    def has_committed(self) -> bool:
        """Whether there are signs that the run was ever committed, even if the commits themselves are gone."""
        return self.newest_number() > 0 or self.store.exists("latest.json")

    def read_commit(self, number: int) -> Commit:
        """One commit.

        Raises:
            NameMissing: there is none of this number.
            RecordDamaged: its record can't be read.
        """
        if number not in self._commits:
            name = record_name("commits", number)
            commit = read_record(self.store, Commit, name)
            if commit.number != number:
                raise RecordDamaged(f"{name} says that it is commit {commit.number}")
            self._commits[number] = commit
        return self._commits[number]

    def find_commit(self, number: int) -> Commit | None:
        """Return one commit; None where there is none of this number, or its record can't be read."""
        with contextlib.suppress(NameMissing, RecordDamaged):
            return self.read_commit(number) if number else None
        return None

    def path_of(self, number: int) -> str:
        """Return the folder that a commit names; empty where its record is lost."""
        commit = self.find_commit(number)
        return commit.path if commit else ""

    def is_pruned(self, number: int) -> bool:
        """Whether retention has given up this commit's checkpoint."""
        return self.store.exists(record_name("pruned", number))

    def is_quarantined(self, number: int) -> bool:
        """Whether this commit is not to be used again."""
        return self.store.exists(record_name("quarantine", number))

    def candidates(self, attempt: int | None = None) -> Iterator[Commit]:
        """The commits that a run may continue from, newest first. Their checkpoints' bytes are not looked at.

        The walk goes by number, not by parent, so that one lost record doesn't hide what lies before it; the commits
        of a line that was given up are quarantined, and so are passed over.

        Args:
            attempt: who walks; it quarantines a record that can't be read. A mere reader passes over it.
        """
        quarantined = set(self.numbers("quarantine"))
        pruned: set[int] | None = None
        for number in self._newest_first():
            if number in quarantined:
                continue
            if self.is_pruned(number) if pruned is None else number in pruned:
                continue
            try:
                yield self.read_commit(number)
            except NameMissing:
                continue
            except RecordDamaged as error:
                if attempt is not None:
                    self.quarantine(number, str(error), attempt)
            if pruned is None:  # whoever wants more than the newest may have a long way to go
                pruned = set(self.numbers("pruned"))

    def _newest_first(self) -> Iterator[int]:
        """Yield the numbers of the commits that there are. The newest costs no look at the others."""
        if newest := self.newest_number():
            yield newest
            yield from (number for number in reversed(self.numbers("commits")) if number < newest)

    def newest(self) -> Commit | None:
        """The newest commit that a run may continue from, if there is one."""
        return next(self.candidates(), None)

    def publish_commit(self, commit: Commit, envelope: bytes | None = None) -> Commit:
        """The commit counts, as it is returned: where it was made before, and interrupted, as it was made then.

        Args:
            envelope: its signature, which is on the store before the commit is.

        Raises:
            Superseded: a later attempt owns the run.
            NameTaken: an earlier attempt took the number, between its look at the fence and our claim.
        """
        self.check_fence(commit.attempt)
        if envelope is not None:
            self.store.replace(signature_name(commit), envelope)
        try:
            self.store.create(record_name("commits", commit.number), commit.to_bytes())
        except NameTaken:
            there = self.read_commit(commit.number)
            if (there.attempt, there.path) != (commit.attempt, commit.path):
                self.check_fence(commit.attempt)
                raise
            commit = there
        faults.reach("commit-recorded")
        return commit

    def publish_metrics(self, number: int, metrics: bytes) -> None:
        """What was logged in a commit's steps is where charts look for it. The checkpoint's own copy may be pruned."""
        self.store.replace(metrics_name(number), metrics)

    def publish_latest(self, latest: Latest) -> None:
        """latest.json has these values."""
        self.store.replace("latest.json", latest.to_bytes())
        self._reached = {"attempts": latest.attempt, "commits": latest.commit}
        faults.reach("latest-replaced")

    def record_sha256(self, number: int) -> str:
        """SHA-256 of a commit record's bytes: what links the next one to it. Empty for commit 0 and a lost record."""
        try:
            data = self.store.read(record_name("commits", number), 0, MAX_RECORD_BYTES + 1) if number else b""
        except NameMissing:
            return ""
        return hashlib.sha256(data).hexdigest() if data else ""

    def broken_links(self, commit: Commit) -> list[str]:
        """Return a line for each broken link between a commit and what came before it; see `links.broken_links`."""
        before, sha256 = self._read_hashed(commit.number - 1)
        parent = before if commit.parent == commit.number - 1 else self.find_commit(commit.parent)
        return broken_links(commit, before, sha256, parent)

    def _read_hashed(self, number: int) -> tuple[Commit | None, str]:
        """Return a commit, and SHA-256 of its record's bytes; None where it can't be read."""
        name = record_name("commits", number)
        with contextlib.suppress(NameMissing, RecordDamaged):
            data = self.store.read(name, 0, MAX_RECORD_BYTES + 1) if number else b""
            commit = Commit.from_bytes(data, name) if data else None
            if commit is not None and commit.number == number:
                self._commits[number] = commit
                return commit, hashlib.sha256(data).hexdigest()
        return None, ""

    # ---- quarantine and pins

    def quarantine(self, number: int, reason: str, attempt: int) -> None:
        """The commit is never used again, by anyone; the first reason stays.

        Raises:
            Superseded: a later attempt owns the run, and judges for itself.
        """
        self.check_fence(attempt)
        log.warning("commit %d of run %r is quarantined: %s", number, self.run, reason)
        record = Quarantine(commit=number, reason=reason, attempt=attempt, created_at=now())
        with contextlib.suppress(NameTaken):  # another attempt found it first
            self.store.create(record_name("quarantine", number), record.to_bytes())

    def quarantine_reasons(self) -> list[str]:
        """Why each quarantined commit is, in order of number."""
        reasons = []
        for number in self.numbers("quarantine"):
            try:
                reasons.append(read_record(self.store, Quarantine, record_name("quarantine", number)).reason)
            except RecordDamaged as error:
                reasons.append(str(error))
        return reasons

    def pin(self, number: int) -> None:
        """No retention gives up this commit's checkpoint, until it is unpinned.

        Raises:
            WrongUse: there is no such commit, or its checkpoint is gone.
        """
        try:
            self.read_commit(number)
        except NameMissing:
            raise WrongUse(
                f"run {self.run!r} has no commit {number}", hint=f"its newest is {self.newest_number()}"
            ) from None
        with contextlib.suppress(NameTaken):
            self.store.create(record_name("pins", number), Pin(commit=number, created_at=now()).to_bytes())
        # Retention looks at the pins after it has put down that it gives a checkpoint up; one of us sees the other.
        if self.is_pruned(number):
            self.unpin(number)
            raise WrongUse(f"the checkpoint of commit {number} was pruned", hint="holdfast verify lists what there is")

    def unpin(self, number: int) -> None:
        """Retention may give up this commit's checkpoint."""
        self.store.delete(record_name("pins", number))


def find_runs(store: Store) -> Iterator[Journal]:
    """The runs of a store, by name."""
    for name in store.list():
        journal = Journal(store, name)
        if journal.exists():
            yield journal


def list_runs(store: Store) -> list[Journal]:
    """The runs of a store, by name; where there are none, a warning says so."""
    journals = list(find_runs(store))
    if not journals:
        log.warning("there are no runs in %s", store.url)
    return journals
