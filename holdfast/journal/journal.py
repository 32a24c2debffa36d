"""The journal: the rules that decide who may write a run and which checkpoints count.

A run's folder has numbered records, each created once and never changed: ``attempts/`` (claims of the right to write),
``commits/`` (the checkpoints that count; each names its parent), ``quarantine/`` (commits that must not be used again)
and ``pruned/`` (commits whose checkpoints were deleted). These records alone decide. ``latest.json`` is a hint at the
newest number, so that finding this number doesn't take longer as a run grows.
"""

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from holdfast.errors import (
    CheckpointDamaged,
    ConfigError,
    FolderTaken,
    NameMissing,
    NameTaken,
    NoVerifiedCheckpoint,
    ParentQuarantined,
    RecordDamaged,
    RunGone,
    RunHeld,
    RunUnknown,
    Superseded,
    WrongUse,
)
from holdfast.journal.endings import Ending
from holdfast.journal.folder import RunFolder
from holdfast.journal.links import broken_links
from holdfast.journal.names import REACH
from holdfast.journal.records import (
    HELD,
    MAX_RECORD_BYTES,
    AttemptRecord,
    Commit,
    EndingRecord,
    FolderRecord,
    IndexRecord,
    Latest,
    Pin,
    Quarantine,
    RehearsalRecord,
    folder_record_name,
    now,
    read_commit,
    read_record,
    record_name,
    signature_name,
)
from holdfast.machine import faults
from holdfast.store import Store

log = logging.getLogger(__name__)


class Journal(RunFolder):
    """The journal of one run: reads and writes the records in the run's folder on its store."""

    def __init__(self, store: Store, run: str) -> None:
        super().__init__(store, run)
        self._commits: dict[int, Commit] = {}  # cached, because a record never changes
        self._hashed: dict[str, str] = {}  # see `hash_once`
        # The highest known number in each folder. Other processes may have added higher numbers since.
        self._reached: dict[str, int] | None = None

    # ---- attempts: who may write

    def attempts(self) -> int:
        """Return the highest attempt number that was claimed; 0 if none was claimed."""
        return self._find_highest("attempts")

    def next_attempt(self) -> int:
        """Return the number that the next attempt is to claim."""
        return self.attempts() + 1

    def has_attempt(self, number: int) -> bool:
        """Return whether an attempt claimed this number."""
        return self.store.exists(record_name("attempts", number))

    def read_attempt(self, number: int) -> AttemptRecord:
        """Read an attempt's record."""
        return read_record(self.store, AttemptRecord, record_name("attempts", number))

    def find_attempt(self, number: int) -> AttemptRecord | None:
        """Return the record of this attempt; None if it is missing or can't be read."""
        with contextlib.suppress(NameMissing, RecordDamaged):
            return self.read_attempt(number)
        return None

    def claim_attempt(
        self,
        number: int,
        reason: str,
        host: str,
        pid: int,
        environment: dict[str, Any],
        lineage: dict[str, Any] | None = None,
        began_at: str = "",
    ) -> AttemptRecord:
        """Claim attempt ``number`` for this process alone. Every attempt with a lower number is then superseded.

        The record contains a random token. If the store's response is lost, the process recognizes its own claim by the
        token.

        Args:
            number: the attempt's number: the highest claimed number plus one.
            reason: why the attempt starts, such as ``fresh`` or ``continued``; the record's key is ``why``.
            host: the name of this machine.
            environment: facts about the machine, the packages and the code.
            lineage: the differences from the previous attempt.
            began_at: when the attempt's ranks were started; empty if unknown.

        Raises:
            ConfigError: the number is far too high, so readers would ignore the record as a stray file.
            Superseded: another process claimed the number.
        """
        if number < 1 or (number > REACH and number > self.attempts() + REACH):
            raise ConfigError(
                f"attempt {number} of run {self.run!r} can't begin: the number is far too high",
                hint=f"the next attempt has the number {self.next_attempt()}",
            )
        record = AttemptRecord(
            number=number,
            why=reason,
            created_at=now(),
            began_at=began_at,
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
                f"another process has just started attempt {number} of run {self.run!r}",
                hint="let that process train the run; or end it, and start the command again",
                attempt=number,
            ) from None
        return record

    def end_attempt(self, number: int, ending: Ending) -> Ending:
        """Record how an attempt ended. If an ending is already recorded, keep and return the recorded ending."""
        record = EndingRecord(number=number, created_at=now(), **vars(ending))
        try:
            self.store.create(record_name("endings", number), record.to_bytes())
        except NameTaken:
            known = self.read_ending(number)
            return known.ending if known else ending
        self.enter(record_name("endings", number))
        return ending

    def record_rehearsal(self, record: RehearsalRecord) -> None:
        """Record the steps that the next attempt has to train from a commit. Keep an earlier record of the attempt."""
        name = record_name("rehearsals", record.attempt)
        with contextlib.suppress(NameTaken):
            self.store.create(name, record.to_bytes())
            self.enter(name)

    def find_rehearsal(self, commit: Commit) -> RehearsalRecord | None:
        """Return the newest record of the steps after a commit; None if there is none."""
        for number in reversed(self.numbers("rehearsals")):
            if number < commit.attempt:  # earlier attempts can't have known the commit
                break
            with contextlib.suppress(NameMissing, RecordDamaged):
                record = read_record(self.store, RehearsalRecord, record_name("rehearsals", number))
                if record.commit == commit.number:
                    return record
        return None

    def read_ending(self, number: int) -> EndingRecord | None:
        """Return the record of an attempt's ending; None if it is missing or can't be read."""
        try:
            return read_record(self.store, EndingRecord, record_name("endings", number))
        except NameMissing:
            return None
        except RecordDamaged as error:
            self.warn(str(error))
            return None

    def endings(self) -> list[Ending]:
        """Return the recorded endings, in order of the attempts."""
        found = map(self.read_ending, self.numbers("endings"))
        return [record.ending for record in found if record is not None]

    def check_fence(self, attempt: int) -> None:
        """Check that this attempt may still write the run. While the attempt's record exists, that costs one request.

        Raises:
            RunGone: the run was moved or deleted.
            RunHeld: an audit holds the run.
            Superseded: a later attempt has claimed the run.
        """
        claimed = self.numbers("attempts", after=attempt - 1)
        if attempt not in claimed and not self.exists():
            raise RunGone.of(self.store.url)
        highest = max(claimed, default=0)
        if highest <= attempt:
            return
        self.check_held(highest)
        raise Superseded(
            f"attempt {attempt} of run {self.run!r} is superseded by attempt {highest}",
            hint="a later attempt, in another process, trains this run now; the commits of both attempts stay",
            attempt=attempt,
            by=highest,
        )

    def check_held(self, newest: int) -> None:
        """Check that no audit holds the run.

        Args:
            newest: the number of the newest attempt; 0 if there is none.

        Raises:
            RunHeld: an audit holds the run.
        """
        hold = self.find_hold(newest)
        if hold is not None:
            raise RunHeld.of(self.run, self.store.url, str(hold.lineage.get(HELD, "audits have named a machine")))

    def find_hold(self, newest: int) -> AttemptRecord | None:
        """Return the hold of a run; None if no audit holds it.

        If the hold's record is damaged, return a record made from its ending, so that the run stays held.

        Args:
            newest: the number of the newest attempt; 0 if there is none.
        """
        record = self.find_attempt(newest) if newest else None
        if record is not None:
            return record if record.why == HELD else None
        ending = self.read_ending(newest) if newest else None
        if ending is None or ending.reason != HELD:
            return None
        return AttemptRecord(
            number=newest, why=HELD, created_at=ending.created_at, host="", pid=0, environment={},
            lineage={HELD: ending.message},
        )  # fmt: skip

    @contextlib.contextmanager
    def fenced(self, attempt: int) -> Iterator[None]:
        """If the block fails because files are missing or damaged, check whether this attempt may still write the run.

        A later attempt may have deleted these files, because it adopts this attempt's checkpoints and prunes old ones.

        Raises:
            RunGone: the run was moved or deleted.
            Superseded: a later attempt has claimed the run.
        """
        try:
            yield
        except (NameMissing, CheckpointDamaged, NoVerifiedCheckpoint):
            self.check_fence(attempt)
            raise

    # ---- commits: what counts

    def read_latest(self) -> Latest | None:
        """Read ``latest.json``; return None if it is missing or can't be read."""
        try:
            return read_record(self.store, Latest, "latest.json")
        except NameMissing:
            return None
        except RecordDamaged as error:
            self.warn(f"{error}; the commits are listed instead")
            return None

    def newest_number(self) -> int:
        """Return the number of the newest commit, quarantined or not; 0 if there are no commits."""
        return self._find_highest("commits")

    def _find_highest(self, folder: str) -> int:
        """Return the highest number in a folder. Read ``latest.json`` once, so as to list only later numbers."""
        if self._reached is None:
            latest = self.read_latest()
            self._reached = {"attempts": latest.attempt, "commits": latest.commit} if latest else {}
        self._reached[folder] = self.highest(folder, self._reached.get(folder, 0))
        return self._reached[folder]

    def next_number(self) -> int:
        """Return the number of the next commit. Skip the numbers of lost commits that other records still name."""
        newest = self.newest_number()
        number = max(newest, *self.numbers("quarantine", after=newest), 0) + 1
        while self.is_pruned(number):
            number += 1
        return number

    def has_committed(self) -> bool:
        """Return whether the run ever had a commit: whether there are commit records or at least ``latest.json``."""
        return self.newest_number() > 0 or self.store.exists("latest.json")

    def read_commit(self, number: int) -> Commit:
        """Return the commit with this number.

        Raises:
            NameMissing: there is no such commit.
            RecordDamaged: the commit's record can't be read.
        """
        if number not in self._commits:
            self._commits[number] = read_commit(self.store, number)
        return self._commits[number]

    def find_commit(self, number: int) -> Commit | None:
        """Return the commit with this number; None if its record is missing or can't be read."""
        with contextlib.suppress(NameMissing, RecordDamaged):
            return self.read_commit(number) if number else None
        return None

    def read_parent(self, commit: Commit) -> Commit | None:
        """Return the commit from which a commit was trained; None for the first commit of a run.

        Raises:
            NameMissing: the parent's record is lost, and the run wasn't unpacked from this commit.
            RecordDamaged: the parent's record can't be read, or the parent's number isn't lower than the commit's, so
                that a walk from parent to parent might never end.
        """
        if commit.parent >= commit.number:
            name = record_name("commits", commit.number)
            raise RecordDamaged(f"{name} says that its parent is commit {commit.parent}, which is later")
        try:
            return self.read_commit(commit.parent) if commit.parent else None
        except NameMissing:
            if self.is_unpacked(commit):
                return None
            raise

    def is_unpacked(self, commit: Commit) -> bool:
        """Return whether the run was unpacked from this commit's checkpoint.

        Another run's attempt trained the commit. This run may have an attempt with the same number.
        """
        return commit.number == self._unpacked

    @cached_property
    def _unpacked(self) -> int:
        with contextlib.suppress(RunUnknown, RecordDamaged):
            run = self.read_run()
            return run.first_commit if run.packed else 0
        return 0

    def is_given(self, commit: Commit) -> bool:
        """Return whether the run began with this commit's checkpoint, imported or unpacked, and hasn't trained it."""
        return bool(commit.origin) or self.is_unpacked(commit)

    def first_attempt_after(self, commit: Commit | None) -> int:
        """Return the first attempt that may have trained steps after a commit; None for the beginning of the run."""
        return 1 if commit is None or self.is_unpacked(commit) else commit.attempt

    def find_parent(self, commit: Commit) -> Commit | None:
        """Return the commit from which a commit was trained; None for the first commit, or if the record is lost."""
        with contextlib.suppress(NameMissing, RecordDamaged):
            return self.read_parent(commit)
        return None

    def walk_back(self, newest: Commit | None) -> Iterator[Commit]:
        """Yield a commit and its ancestors, newest first. A lost or damaged record ends the walk; see `find_parent`."""
        while newest is not None:
            yield newest
            newest = self.find_parent(newest)

    def path_of(self, number: int) -> str:
        """Return the name of a commit's checkpoint folder; empty if the commit's record is lost."""
        commit = self.find_commit(number)
        return commit.path if commit else ""

    def is_pruned(self, number: int) -> bool:
        """Return whether retention has deleted this commit's checkpoint, or is about to delete it."""
        return self.store.exists(record_name("pruned", number))

    def is_quarantined(self, number: int) -> bool:
        """Return whether this commit is quarantined, which means that no attempt uses it again."""
        return self.store.exists(record_name("quarantine", number))

    def candidates(self, attempt: int | None = None) -> Iterator[Commit]:
        """Yield the commits from which a run may continue, newest first, without reading their checkpoints.

        The commits are searched by number, not by parent, so that a lost record doesn't hide the commits before it.
        Commits that the run has abandoned are quarantined, so they are left out.

        Args:
            attempt: the attempt that continues the run. It quarantines commits whose records can't be read. If None, as
                for a reader, these commits are only left out.
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
            if pruned is None:  # list the folder once, instead of one request for each commit
                pruned = set(self.numbers("pruned"))

    def _newest_first(self) -> Iterator[int]:
        """Yield the numbers of all commits, newest first. The first number is yielded before the others are listed."""
        if newest := self.newest_number():
            yield newest
            yield from (number for number in reversed(self.numbers("commits")) if number < newest)

    def newest(self) -> Commit | None:
        """Return the newest commit from which a run may continue; None if there is none."""
        return next(self.candidates(), None)

    def publish_commit(self, commit: Commit, envelope: bytes | None = None) -> Commit:
        """Publish a commit. If an interrupted call already published it, return that record unchanged.

        Args:
            envelope: the commit's signature, which is written before the commit.

        Raises:
            FolderTaken: the checkpoint's folder belongs to another commit, or retention is deleting the folder.
            ParentQuarantined: the parent was quarantined meanwhile, so this commit was quarantined, too.
            Superseded: a later attempt has claimed the run.
            NameTaken: an earlier attempt took the number, because its last check came just before this attempt's claim.
        """
        self.check_fence(commit.attempt)
        if not self._may_name(commit.number, commit.path):
            raise FolderTaken(
                f"the checkpoint {commit.path} of run {self.run!r} can't be commit {commit.number}: its folder "
                "belongs to a different commit, or is being deleted",
            )
        if envelope is not None:
            self.store.replace(signature_name(commit.number, commit.attempt), envelope)
        try:
            self.store.create(record_name("commits", commit.number), commit.to_bytes())
        except NameTaken:
            there = self.read_commit(commit.number)
            if (there.attempt, there.path) != (commit.attempt, commit.path):
                self.check_fence(commit.attempt)
                raise
            commit = there
        faults.reach("commit-recorded")
        self._check_parent(commit)
        return commit

    def _check_parent(self, commit: Commit) -> None:
        """Quarantine a commit that was just published, if a person or an audit has quarantined the commit's parent.

        Raises:
            ParentQuarantined: the parent is quarantined.
        """
        if commit.parent and self.is_quarantined(commit.parent):
            reason = f"it continues from commit {commit.parent}, which is quarantined"
            self.quarantine(commit.number, reason, commit.attempt)
            raise ParentQuarantined(f"commit {commit.number} of run {self.run!r} doesn't count: {reason}")

    def assign_folder(self, path: str, number: int) -> int | None:
        """Assign a checkpoint folder permanently to one commit, or to none. The first call for a folder decides.

        A process calls this before it commits a folder, and before it deletes a folder. So a process that decided to
        delete a folder and was then suspended can't delete a newer checkpoint in the same folder.

        Args:
            number: the commit's number; 0 if no commit may name the folder any more, because it is about to be deleted.

        Returns:
            The assigned number, from this or an earlier call; None if the folder's record can't be read.
        """
        name = folder_record_name(path)
        try:
            self.store.create(name, FolderRecord(path=path, commit=number, created_at=now()).to_bytes())
        except NameTaken:
            try:
                return read_record(self.store, FolderRecord, name).commit
            except RecordDamaged as error:
                self.warn(str(error))
                return None
        return number

    def _may_name(self, number: int, path: str) -> bool:
        """Return whether a commit may name a folder: no other commit named it first, or that commit is lost."""
        owner = self.assign_folder(path, number)
        if owner == number or not owner:
            return owner == number
        # The folder is free if the first commit's record is damaged. It is also free if a kill prevented the first
        # commit, and a commit with another folder has that number now. But if a pruned record names the folder, a
        # suspended prune may be about to delete it.
        pruned = self.numbers("pruned", after=owner - 1)
        made = self.find_commit(owner)
        is_free = self.is_void(owner) or (made is not None and made.path != path)
        return is_free and owner not in pruned and path not in map(self.path_of, pruned)

    def is_void(self, number: int) -> bool:
        """Return whether a commit is quarantined because its record can't be read."""
        return self.find_commit(number) is None and self.is_quarantined(number)

    def publish_copy(self, name: str, data: bytes) -> None:
        """Write a copy of a checkpoint's file, such as its trail. The copy remains when the checkpoint is pruned."""
        self.store.replace(name, data)

    def publish_latest(self, latest: Latest) -> None:
        """Replace ``latest.json``."""
        self.store.replace("latest.json", latest.to_bytes())
        self._reached = {"attempts": latest.attempt, "commits": latest.commit}
        faults.reach("latest-replaced")

    def record_sha256(self, number: int) -> str:
        """Return the SHA-256 of a commit record's bytes, which the next commit records as its link.

        Empty for number 0 and for a lost record.
        """
        return self.hash_record(record_name("commits", number)) if number else ""

    def hash_record(self, name: str) -> str:
        """Return the SHA-256 of a record's bytes; empty if the record is lost."""
        try:
            data = self.store.read(name, 0, MAX_RECORD_BYTES + 1)
        except NameMissing:
            return ""
        return hashlib.sha256(data).hexdigest() if data else ""

    def hash_once(self, name: str) -> str:
        """Return the SHA-256 of a record that is written once, without reading it twice; empty if the record is lost.

        The hash of a settings record that this process has written is known without reading it.
        """
        known = self._hashed.get(name) or self.settings.get(name) or self.hash_record(name)
        self._hashed[name] = known
        return known

    def broken_links(self, commit: Commit) -> list[str]:
        """Return a line of text for each broken link from a commit to its predecessors; see `links.broken_links`."""
        before, sha256 = self.read_hashed(commit.number - 1)
        parent = before if commit.parent == commit.number - 1 else self.find_commit(commit.parent)
        return broken_links(commit, before, sha256, parent)

    def read_hashed(self, number: int) -> tuple[Commit | None, str]:
        """Return a commit and the SHA-256 of its record's bytes; (None, "") if the commit can't be read."""
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
        """Quarantine a commit, so that no attempt uses it again. A second call keeps the first reason.

        Raises:
            Superseded: a later attempt has claimed the run, and decides instead of this attempt.
        """
        self.check_fence(attempt)
        record = Quarantine(commit=number, reason=reason, attempt=attempt, created_at=now())
        with contextlib.suppress(NameTaken):  # another attempt has already quarantined the commit
            self.store.create(record_name("quarantine", number), record.to_bytes())
            self.enter(record_name("quarantine", number))
        log.warning("commit %d of run %r is quarantined: %s", number, self.run, reason)

    def find_quarantined_parent(self, commit: Commit) -> str:
        """Return a line of text if a commit was made after its parent was quarantined; otherwise an empty text.

        Such a commit remains if its attempt died or lost the run before it checked the parent; see `publish_commit`. A
        parent that was quarantined later, for damage on a disk, for example, doesn't make the commit wrong.
        """
        if not commit.parent or not self.is_quarantined(commit.parent):
            return ""
        try:
            record = read_record(self.store, Quarantine, record_name("quarantine", commit.parent))
        except (NameMissing, RecordDamaged):
            return ""
        is_before = record.created_at < commit.created_at  # the order within one second is unknown: False
        return f"it continues from commit {commit.parent}, which was already quarantined" if is_before else ""

    def quarantine_reasons(self) -> list[str]:
        """Return the reason for each quarantine, in order of the commits' numbers."""
        reasons = []
        for number in self.numbers("quarantine"):
            try:
                reasons.append(read_record(self.store, Quarantine, record_name("quarantine", number)).reason)
            except (NameMissing, RecordDamaged) as error:  # a folder named like a record raises NameMissing
                reasons.append(str(error))
        return reasons

    def pin(self, number: int, explains: int = 0) -> None:
        """Protect a commit's checkpoint from retention until it is unpinned.

        Args:
            explains: the commit that a process is skipping; 0 for a person's pin, which replaces a pin of the
                run.

        Raises:
            WrongUse: there is no such commit, or its checkpoint was pruned.
        """
        try:
            self.read_commit(number)
        except NameMissing:
            raise WrongUse(
                f"run {self.run!r} has no commit {number}", hint=f"the newest commit is {self.newest_number()}"
            ) from None
        name, data = record_name("pins", number), Pin(commit=number, explains=explains, created_at=now()).to_bytes()
        try:
            self.store.create(name, data)
            self.enter(name)
        except NameTaken:
            if not explains:
                self.store.replace(name, data)
        # Retention checks for a pin after it has written its pruned record. So if a pin and a prune happen at the same
        # time, at least one process sees the other process's record.
        if self.is_pruned(number):
            self.unpin(number)
            raise WrongUse(
                f"the checkpoint of commit {number} was pruned",
                hint="holdfast verify lists the remaining checkpoints",
            )

    def unpin(self, number: int) -> None:
        """Remove a commit's pin, so that retention may delete its checkpoint."""
        self.enter(record_name("pins", number), is_there=False)
        self.store.delete(record_name("pins", number))

    def enter(self, name: str, *, is_there: bool = True) -> None:
        """Add an entry for a record to the index, after the record was written or before it is deleted.

        A kill after the record was written and before its entry was added leaves a record without an entry. `verify`
        can't notice the loss of such a record.
        """
        number = self.highest("index", 0)
        while True:
            number += 1
            record = IndexRecord(number=number, name=name, is_there=is_there, created_at=now())
            with contextlib.suppress(NameTaken):  # another process has taken this number
                self.store.create(record_name("index", number), record.to_bytes())
                return
