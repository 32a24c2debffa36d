"""Who may write a run, and which checkpoints count.

A run's folder has numbered records, each created once and never changed: ``attempts/`` (who claimed the right to
write), ``commits/`` (which checkpoints count; each names its parent) and ``quarantine/`` (which commits are not to be
used again). They are the truth. ``latest.json`` is a hint where to begin to read them.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast import faults
from holdfast.errors import (
    NameMissing,
    NameTaken,
    RecordDamaged,
    RunUnknown,
    Superseded,
    WrongUse,
)
from holdfast.store import Store

FORMAT_VERSION = 1
SHA256 = r"^[0-9a-f]{64}$"
# One folder inside the run: no separators, so no way out of it.
FOLDER = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

log = logging.getLogger(__name__)


class Record(BaseModel):
    """A JSON file of the journal. Keys that a later version added are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RecordDamaged(f"{name} can't be read: {field + ': ' if field else ''}{first['msg']}") from None


AnyRecord = TypeVar("AnyRecord", bound=Record)


class RunRecord(Record):
    """``run.json``: that there is such a run."""

    format: int = Field(ge=1)
    run: str
    recipe: str
    created_at: str


class AttemptRecord(Record):
    """``attempts/00000003.json``: one process life; its number is the fencing token."""

    number: int = Field(ge=1)
    why: str
    created_at: str
    host: str
    pid: int
    environment: dict[str, Any]


class FileRecord(Record):
    """One file of a checkpoint, as it was when it was committed."""

    name: str = Field(pattern=FOLDER)
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=SHA256)


class Commit(Record):
    """``commits/00000007.json``: a checkpoint that counts."""

    number: int = Field(ge=1)
    parent: int = Field(ge=0, description="the commit that it was trained from; 0 for none")
    attempt: int = Field(ge=1)
    step: int = Field(ge=1)
    epoch: int = Field(ge=0, description="epochs completed")
    path: str = Field(pattern=FOLDER)
    files: list[FileRecord]
    checkpoint_sha256: str = Field(pattern=SHA256)
    previous_checkpoint_sha256: str = Field(pattern=rf"{SHA256}|^$")
    previous_record_sha256: str = Field(pattern=rf"{SHA256}|^$", description="of the bytes of commit number - 1")
    config_fingerprint: str = Field(pattern=SHA256)
    why: str = Field(description="chunk, preempted or adopted")
    created_at: str

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Quarantine(Record):
    """``quarantine/00000006.json``: a commit that is not to be used again."""

    commit: int
    reason: str
    attempt: int
    created_at: str


class Pruned(Record):
    """``pruned/00000004.json``: a commit whose checkpoint retention has given up."""

    commit: int
    path: str
    checkpoint_sha256: str
    size_bytes: int
    created_at: str


def now() -> str:
    """The time as records hold it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def record_name(folder: str, number: int) -> str:
    """``commits/00000007.json``"""
    return f"{folder}/{number:08d}.json"


class Journal:
    """The records of one run, on the store that holds its folder."""

    def __init__(self, store: Store, run: str) -> None:
        self.run = run
        self.store = store.inside(run)
        self._parent_url = store.url

    # ---- the run and its settings

    def exists(self) -> bool:
        """Whether the run was ever begun."""
        return self.store.exists("run.json")

    def read_run(self) -> RunRecord:
        """``run.json``.

        Raises:
            RunUnknown: there is no such run.
            WrongUse: a later version wrote it.
        """
        try:
            record = RunRecord.from_bytes(self.store.read("run.json"), "run.json")
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
        """``run.json`` exists; the first to begin the run has written it."""
        record = RunRecord(format=FORMAT_VERSION, run=self.run, recipe=recipe, created_at=now())
        try:
            self.store.create("run.json", record.to_bytes())
        except NameTaken:
            return self.read_run()
        return record

    def record_config(self, fingerprint: str, config: dict[str, Any]) -> None:
        """The settings in force are on the store, under their fingerprint and as the snapshot."""
        data = _json_bytes({"fingerprint": fingerprint, **config})
        with contextlib.suppress(NameTaken):  # this configuration has trained here before
            self.store.create(f"configs/{fingerprint}.json", data)
        self.store.replace("config.snapshot.json", data)

    def read_config(self, fingerprint: str) -> dict[str, Any] | None:
        """The settings that have this fingerprint, as they were first used; None where they were lost."""
        return self._read_json(f"configs/{fingerprint}.json")

    def read_epochs(self) -> int | None:
        """How many epochs the run was last asked for; None where that was lost."""
        try:
            return int((self._read_json("config.snapshot.json") or {})["config"]["epochs"])
        except (KeyError, TypeError, ValueError):
            return None

    def _read_json(self, name: str) -> dict[str, Any] | None:
        try:
            value = json.loads(self.store.read(name))
        except (NameMissing, ValueError):
            return None
        return value if isinstance(value, dict) else None

    # ---- attempts: who may write

    def attempts(self) -> int:
        """The highest attempt number claimed; 0 for none."""
        return _highest(self.store.list("attempts"))

    def read_attempt(self, number: int) -> AttemptRecord:
        """One attempt's record."""
        return self._read(AttemptRecord, record_name("attempts", number))

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
        if self.store.exists(record_name("attempts", attempt + 1)):
            raise self._superseded(attempt)

    def _superseded(self, attempt: int) -> Superseded:
        highest = self.attempts()
        return Superseded(
            f"attempt {attempt} of run {self.run!r} is superseded by attempt {highest}",
            hint="another process trains this run; nothing that it committed was touched",
            attempt=attempt,
            by=highest,
        )

    # ---- commits: what counts

    def newest_number(self) -> int:
        """The number of the newest commit, quarantined or not; 0 for none.

        Begins at latest.json and asks for the next number until there is none, so that the cost doesn't grow with
        the run. A latest.json that is missing, unreadable or ahead of the commits is a reason to list them.
        """
        number = self.latest_number()
        if number == 0 or not self.store.exists(record_name("commits", number)):
            number = _highest(self.store.list("commits"))
        while self.store.exists(record_name("commits", number + 1)):
            number += 1
        return number

    def latest_number(self) -> int:
        """The commit that latest.json names; 0 where it is missing or can't be read."""
        try:
            latest = json.loads(self.store.read("latest.json"))
            number = latest["commit"]
        except NameMissing:
            return 0
        except (ValueError, KeyError, TypeError):
            log.warning("latest.json of run %r can't be read; the commits are listed instead", self.run)
            return 0
        return number if isinstance(number, int) and number > 0 else 0

    def has_committed(self) -> bool:
        """Whether there are signs that the run was ever committed, even if the commits themselves are gone."""
        return self.newest_number() > 0 or self.store.exists("latest.json")

    def path_of(self, number: int) -> str:
        """The folder that a commit names; empty where its record is lost."""
        try:
            return self.read_commit(number).path
        except (NameMissing, RecordDamaged):
            return ""

    def read_commit(self, number: int) -> Commit:
        """One commit.

        Raises:
            NameMissing: there is none of this number.
            RecordDamaged: its record can't be read.
        """
        name = record_name("commits", number)
        commit = self._read(Commit, name)
        if commit.number != number:
            raise RecordDamaged(f"{name} says that it is commit {commit.number}")
        return commit

    def is_quarantined(self, number: int) -> bool:
        """Whether this commit is not to be used again."""
        return self.store.exists(record_name("quarantine", number))

    def is_pruned(self, number: int) -> bool:
        """Whether retention has given up this commit's checkpoint."""
        return self.store.exists(record_name("pruned", number))

    def candidates(self, attempt: int | None = None) -> Iterator[Commit]:
        """The commits that a run may continue from, newest first. Their checkpoints' bytes are not looked at.

        The walk goes by number, not by parent, so that one lost record doesn't hide what lies before it; the commits
        of a line that was given up are quarantined, and so are passed over.

        Args:
            attempt: who walks; it quarantines a record that can't be read. A mere reader passes over it.
        """
        for number in range(self.newest_number(), 0, -1):
            if self.is_quarantined(number) or self.is_pruned(number):
                continue
            try:
                yield self.read_commit(number)
            except NameMissing:
                continue
            except RecordDamaged as error:
                if attempt is not None:
                    self.quarantine(number, str(error), attempt)

    def lost_commits(self) -> list[int]:
        """The numbers up to the newest whose record is missing or can't be read, and which nobody has quarantined."""
        lost = []
        for number in range(1, self.newest_number() + 1):
            try:
                self.read_commit(number)
            except (NameMissing, RecordDamaged):
                if not self.is_quarantined(number):
                    lost.append(number)
        return lost

    def newest(self) -> Commit | None:
        """The newest commit that a run may continue from, if there is one."""
        return next(self.candidates(), None)

    def publish_commit(self, commit: Commit, metrics: bytes, latest: dict[str, Any]) -> None:
        """The commit counts, and latest.json names it. The order is: fence, metrics, commit record, latest.

        Metrics under a number that was never committed are replaced by whoever commits it, so that the steps of a line
        that was given up leave no trace.

        Doing it again, after it was interrupted, finishes it.

        Raises:
            Superseded: a later attempt owns the run.
            NameTaken: an earlier attempt took the number, between its look at the fence and our claim.
        """
        self.check_fence(commit.attempt)
        self.store.replace(f"metrics/{commit.number:08d}.jsonl", metrics)
        try:
            self.store.create(record_name("commits", commit.number), commit.to_bytes())
        except NameTaken:
            there = self.read_commit(commit.number)
            if (there.attempt, there.path) != (commit.attempt, commit.path):
                self.check_fence(commit.attempt)
                raise
        faults.reach("commit-recorded")
        self.publish_latest(latest)
        faults.reach("latest-replaced")

    def publish_latest(self, latest: dict[str, Any]) -> None:
        """latest.json has these values."""
        self.store.replace("latest.json", _json_bytes(latest))

    def record_sha256(self, number: int) -> str:
        """SHA-256 of a commit record's bytes: what links the next one to it. Empty for commit 0 and a lost record."""
        try:
            return hashlib.sha256(self.store.read(record_name("commits", number))).hexdigest() if number else ""
        except NameMissing:
            return ""

    def quarantine(self, number: int, reason: str, attempt: int) -> None:
        """The commit is never used again, by anyone; the first reason stays."""
        log.warning("commit %d of run %r is quarantined: %s", number, self.run, reason)
        record = Quarantine(commit=number, reason=reason, attempt=attempt, created_at=now())
        with contextlib.suppress(NameTaken):  # another attempt found it first
            self.store.create(record_name("quarantine", number), record.to_bytes())

    def quarantine_reasons(self) -> list[str]:
        """Why each quarantined commit is, in order of number."""
        names = self.store.list("quarantine")
        return [self._read(Quarantine, f"quarantine/{name}").reason for name in names]

    def _read(self, cls: type[AnyRecord], name: str) -> AnyRecord:
        return cls.from_bytes(self.store.read(name), name)


def _highest(names: list[str]) -> int:
    return max((int(name[:8]) for name in names if name[:8].isdigit() and name.endswith(".json")), default=0)


def _json_bytes(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()
