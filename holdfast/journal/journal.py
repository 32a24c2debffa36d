"""Who may write a run, and which checkpoints count.

A run's folder has numbered records, each created once and never changed: ``attempts/`` (who claimed the right to
write), ``commits/`` (which checkpoints count; each names its parent), ``quarantine/`` (which commits are not to be
used again) and ``pruned/`` (whose checkpoints were given up). They are the truth. ``latest.json`` is a hint where to
begin to read them, so that finding the newest costs the same however many there are.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from holdfast import faults
from holdfast.config import Retention
from holdfast.errors import NameMissing, NameTaken, RecordDamaged, RunUnknown, Superseded, WrongUse
from holdfast.journal.records import (
    FORMAT_VERSION,
    MAX_RECORD_BYTES,
    AttemptRecord,
    Commit,
    ConfigRecord,
    Latest,
    Pin,
    Quarantine,
    RunRecord,
    now,
    read_record,
    record_name,
)
from holdfast.store import Store

log = logging.getLogger(__name__)


class Journal:
    """The records of one run, on the store that holds its folder."""

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.store = store.inside(run)
        self._parent_url = store.url
        self._commits: dict[int, Commit] = {}  # a record never changes
        self._warned: set[str] = set()

    # ---- the run and its settings

    def exists(self) -> bool:
        """Whether the run was ever begun."""
        return self.store.exists("run.json")

    def read_run(self) -> RunRecord:
        """``run.json``.

        Raises:
            RunUnknown: there is no such run.
            RecordDamaged: it can't be read.
            WrongUse: a later version wrote it.
        """
        try:
            record = read_record(self.store, RunRecord, "run.json")
        except NameMissing:
            raise RunUnknown(
                f"there is no run {self.run!r} in {self._parent_url}",
                hint=f"holdfast runs {self._parent_url} lists the runs there",
            ) from None
        if record.format > FORMAT_VERSION:
            raise WrongUse(
                f"run {self.run!r} has format {record.format}; this version reads up to {FORMAT_VERSION}",
                hint="upgrade holdfast",
            )
        return record

    def begin(self, recipe: str) -> RunRecord:
        """``run.json`` exists and can be read; the first to begin the run has written it."""
        try:
            return self.read_run()
        except RunUnknown:
            write = self.store.create
        except RecordDamaged as error:
            self._warn(f"{error}; it is written anew")
            write = self.store.replace
        record = RunRecord(
            format=FORMAT_VERSION,
            run=self.run,
            recipe=recipe,
            first_commit=min(self.numbers("commits"), default=1),
            created_at=now(),
        )
        try:
            write("run.json", record.to_bytes())
        except NameTaken:  # another process has begun it a moment ago
            return self.read_run()
        return record

    def record_config(self, fingerprint: str, identity: dict[str, Any], config: dict[str, Any]) -> None:
        """The settings in force are on the store, under their fingerprint and as the snapshot."""
        data = ConfigRecord(fingerprint=fingerprint, identity=identity, config=config).to_bytes()
        try:
            self.store.create(f"configs/{fingerprint}.json", data)
        except NameTaken:
            if self.read_config(fingerprint) is None:
                self.store.replace(f"configs/{fingerprint}.json", data)
        self.store.replace("config.snapshot.json", data)

    def read_config(self, fingerprint: str) -> ConfigRecord | None:
        """The settings that have this fingerprint, as they were first used; None where they were lost."""
        return self._read_config(f"configs/{fingerprint}.json")

    def read_epochs(self) -> int | None:
        """How many epochs the run was last asked for; None where that was lost."""
        snapshot = self._read_config("config.snapshot.json")
        epochs = snapshot.config.get("epochs") if snapshot else None
        return epochs if isinstance(epochs, int) else None

    def read_retention(self) -> Retention | None:
        """How the run was last asked to be pruned; None where that was lost."""
        snapshot = self._read_config("config.snapshot.json")
        try:
            return Retention.model_validate(snapshot.config["retention"]) if snapshot else None
        except (KeyError, ValidationError):
            return None

    def _read_config(self, name: str) -> ConfigRecord | None:
        try:
            return read_record(self.store, ConfigRecord, name)
        except NameMissing:
            return None
        except RecordDamaged as error:
            self._warn(str(error))
            return None

    def _warn(self, message: str) -> None:
        """One warning, however often the same is read."""
        if message not in self._warned:
            log.warning("run %r: %s", self.run, message)
        self._warned.add(message)

    def numbers(self, folder: str, after: int = 0) -> list[int]:
        """The numbers above ``after`` that a folder of records has, sorted."""
        names = self.store.list(folder, after=f"{after:08d}.json" if after else "")
        return [int(name[:8]) for name in names if len(name) == 13 and name[:8].isdigit() and name.endswith(".json")]

    def _highest(self, folder: str, hint: int) -> int:
        """The highest number in a folder; 0 for none. Where the hint is right, the cost doesn't grow with the run."""
        found = self.numbers(folder, after=hint - 1) if hint else []
        return max(found or self.numbers(folder), default=0)

    # ---- attempts: who may write

    def attempts(self) -> int:
        """The highest attempt number claimed; 0 for none."""
        latest = self.read_latest()
        return self._highest("attempts", latest.attempt if latest else 0)

    def read_attempt(self, number: int) -> AttemptRecord:
        """One attempt's record."""
        return read_record(self.store, AttemptRecord, record_name("attempts", number))

    def claim_attempt(self, number: int, why: str, host: str, pid: int, environment: dict[str, Any]) -> AttemptRecord:
        """This process, and no other, is attempt ``number``; every lower one is superseded.

        Raises:
            Superseded: the number is taken.
        """
        record = AttemptRecord(number=number, why=why, created_at=now(), host=host, pid=pid, environment=environment)
        try:
            self.store.create(record_name("attempts", number), record.to_bytes())
        except NameTaken:
            raise Superseded(
                f"attempt {number} of run {self.run!r} was claimed by another process a moment ago",
                hint="that process trains this run",
                attempt=number,
            ) from None
        return record

    def check_fence(self, attempt: int) -> None:
        """Return if no later attempt has claimed the run.

        Raises:
            Superseded: one has.
        """
        if not self.store.exists(record_name("attempts", attempt + 1)):
            return
        highest = self.attempts()
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
            self._warn(f"{error}; the commits are listed instead")
            return None

    def newest_number(self) -> int:
        """The number of the newest commit, quarantined or not; 0 for none."""
        latest = self.read_latest()
        return self._highest("commits", latest.commit if latest else 0)

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

    def path_of(self, number: int) -> str:
        """The folder that a commit names; empty where its record is lost."""
        try:
            return self.read_commit(number).path
        except (NameMissing, RecordDamaged):
            return ""

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
        for number in range(self.newest_number(), 0, -1):
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
        faults.reach("latest-replaced")

    def record_sha256(self, number: int) -> str:
        """SHA-256 of a commit record's bytes: what links the next one to it. Empty for commit 0 and a lost record."""
        try:
            data = self.store.read(record_name("commits", number), 0, MAX_RECORD_BYTES + 1) if number else b""
        except NameMissing:
            return ""
        return hashlib.sha256(data).hexdigest() if data else ""

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


def metrics_name(number: int) -> str:
    """``metrics/00000007.jsonl``"""
    return f"metrics/{number:08d}.jsonl"


def signature_name(commit: Commit) -> str:
    """``signatures/00000007-00000003.json``: of a commit, by an attempt that meant to make it."""
    return f"signatures/{commit.number:08d}-{commit.attempt:08d}.json"


def find_runs(store: Store) -> Iterator[Journal]:
    """The runs of a store, by name."""
    for name in store.list():
        journal = Journal(store, name)
        if journal.exists():
            yield journal
