"""Is a run on its store what was committed? Every record and every byte is read back."""

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel

from holdfast import checkpoint
from holdfast.errors import CheckpointDamaged, Damage, HoldfastError, NameMissing, RecordDamaged
from holdfast.fingerprint import fingerprint
from holdfast.journal import (
    AttemptRecord,
    Commit,
    ConfigRecord,
    Journal,
    Latest,
    Pin,
    Pruned,
    PruneReport,
    Quarantine,
    Record,
    metrics_name,
    read_record,
    record_name,
)
from holdfast.journal.signing import check_signed
from holdfast.signature import TrustedKey

# Hashing runs outside of Python's lock, and waiting for a storage even more so.
WORKERS = 8

NUMBERED: dict[str, tuple[type[Record], str]] = {
    "attempts": (AttemptRecord, "number"),
    "quarantine": (Quarantine, "commit"),
    "pruned": (Pruned, "commit"),
    "pins": (Pin, "commit"),
    "prunes": (PruneReport, "newest"),
}


class CheckedCheckpoint(BaseModel):
    """One checkpoint that was read back.

    Attributes:
        commit: None for one that no commit names.
        standing: ``counts``, ``quarantined`` or ``uncommitted``. Damage of the last two is no news.
        damaged: each file that differs, with both digests.
    """

    commit: int | None
    path: str
    checkpoint_sha256: str
    size_bytes: int
    standing: str
    damaged: list[dict[str, Any]]


class VerifyReport(BaseModel):
    """What was found.

    Attributes:
        problems: a line for each thing that is damaged, lost or not signed as it should be.
        notes: what is not as usual and mends itself.
    """

    run: str
    ok: bool
    problems: list[str]
    notes: list[str]
    records: int
    checkpoints: list[CheckedCheckpoint]


def verify_run(
    journal: Journal,
    *,
    everything: bool = False,
    deep: bool = False,
    trusted_keys: Sequence[TrustedKey] = (),
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Read a run back: all its records and how they chain, and every byte of every checkpoint that counts.

    Args:
        everything: also the checkpoints that are in quarantine, and those that no commit names.
        deep: also what the bytes say: that each state can be read, and agrees with its commit.
        trusted_keys: one of them must have signed each commit that counts.
        watch: called with the bytes read and the bytes to read.

    Raises:
        RunUnknown: there is no such run.
    """
    return _Verification(journal, deep=deep, trusted_keys=trusted_keys, watch=watch).run(everything)


class _Verification:
    def __init__(
        self,
        journal: Journal,
        *,
        deep: bool,
        trusted_keys: Sequence[TrustedKey],
        watch: Callable[[int, int], None],
    ) -> None:
        self.journal = journal
        self.store = journal.store
        self.deep = deep
        self.trusted_keys = trusted_keys
        self.watch = watch
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.records = 0
        self.done_bytes = 0
        self.total_bytes = 0
        self.lock = threading.Lock()
        self.is_given_up = False

    def run(self, everything: bool) -> VerifyReport:
        with self._workers() as pool:
            first = self._check_run()
            self._add(pool.map(self._check_record, self._list_records()))
            quarantined = set(self.journal.numbers("quarantine"))
            pruned = set(self.journal.numbers("pruned"))
            named = self._list_named(pruned)  # before the commits, which a live attempt makes before it names them
            there = [number for number in self.journal.numbers("commits") if number >= first]
            newest = max(there, default=0)
            raw = dict(pool.map(self._read_commit, there))
            commits = [commit for commit in raw.values() if isinstance(commit, Commit)]
            sha256 = dict(pool.map(self._hash_record, commits))
            self._check_numbers(first, [number for number in quarantined if number >= first] + there, named)
            self._check_commits(raw, sha256, quarantined)
            self._check_latest(newest)
            counting = [commit for commit in commits if commit.number not in quarantined]
            self._add(pool.map(lambda commit: self._check_metrics(commit, newest), counting))
            live = [commit for commit in counting if commit.number not in pruned]
            self._add(pool.map(self._check_signed, live if self.trusted_keys else ()))
            chosen = [(commit, "counts") for commit in live]
            if everything:
                chosen += [(commit, "quarantined") for commit in commits if commit.number in quarantined - pruned]
            chosen.sort(key=lambda pair: pair[0].number, reverse=True)
            self.total_bytes = sum(commit.size_bytes for commit, _ in chosen)
        # A deep look has a whole checkpoint in memory.
        with self._workers(1 if self.deep else WORKERS) as pool:
            checked = [entry for entry in pool.map(lambda pair: self._check_checkpoint(*pair), chosen) if entry]
        if everything:
            checked += self._check_uncommitted({commit.path for commit in commits})
        return VerifyReport(
            run=self.journal.run,
            ok=not self.problems,
            problems=self.problems,
            notes=self.notes,
            records=self.records,
            checkpoints=checked,
        )

    @contextlib.contextmanager
    def _workers(self, count: int = WORKERS) -> Iterator[ThreadPoolExecutor]:
        """Threads that end soon when the block fails, however much they have still to read."""
        with ThreadPoolExecutor(count) as pool:
            try:
                yield pool
            except BaseException:
                self.is_given_up = True
                raise

    def _add(self, found: Iterable[str | None]) -> None:
        self.problems += [problem for problem in found if problem]

    def _check_run(self) -> int:
        """The number of the first commit that the run should have."""
        self.records += 1
        try:
            return self.journal.read_run().first_commit
        except RecordDamaged as error:
            self.problems.append(str(error))
            return min(self.journal.numbers("commits"), default=1)

    def _list_records(self) -> Iterator[tuple[str, type[Record], str, Any]]:
        """Name, class, and which field must have which value."""
        if self.store.exists("config.snapshot.json"):
            yield "config.snapshot.json", ConfigRecord, "", None
        for name in self.store.list("configs"):
            yield f"configs/{name}", ConfigRecord, "fingerprint", name.removesuffix(".json")
        for folder, (cls, field) in NUMBERED.items():
            for number in self.journal.numbers(folder):
                yield record_name(folder, number), cls, field, number

    def _check_record(self, entry: tuple[str, type[Record], str, Any]) -> str | None:
        name, cls, field, expected = entry
        with self.lock:
            self.records += 1
        try:
            record = read_record(self.store, cls, name)
        except RecordDamaged as error:
            return str(error)
        except NameMissing:  # unpinned just now
            return None
        if field and getattr(record, field) != expected:
            return f"{name} says that it is of {getattr(record, field)}"
        if isinstance(record, ConfigRecord) and fingerprint(record.identity) != record.fingerprint:
            return f"{name}: its settings don't have its fingerprint"
        return None

    def _list_named(self, pruned: set[int]) -> set[int]:
        """The numbers of the commits that other records speak of."""
        logged = {int(name[:8]) for name in self.store.list("metrics") if re.fullmatch(r"[0-9]{8}\.jsonl", name)}
        named = {*pruned, *logged, *self.journal.numbers("pins"), *self.journal.numbers("prunes")}
        with contextlib.suppress(NameMissing, RecordDamaged):
            named.add(read_record(self.store, Latest, "latest.json").commit)
        return named

    def _check_numbers(self, first: int, there: Collection[int], named: Collection[int]) -> None:
        """No record of a commit is ever taken away, so that none is missing in between, nor at the end."""
        before = first - 1
        for number in (*sorted(set(there)), max([before, *there, *named]) + 1):
            if number - before > 1:
                lost = [record_name("commits", each) for each in (before + 1, number - 1)]
                self.problems.append(
                    f"{lost[0]} is missing" if lost[0] == lost[1] else f"{lost[0]} to {lost[1]} are missing"
                )
            before = number

    def _read_commit(self, number: int) -> tuple[int, Commit | HoldfastError]:
        with self.lock:
            self.records += 1
        try:
            return number, self.journal.read_commit(number)
        except (NameMissing, RecordDamaged) as error:
            return number, error

    def _hash_record(self, commit: Commit) -> tuple[int, str]:
        return commit.number, self.journal.record_sha256(commit.number)

    def _check_commits(
        self, found: dict[int, Commit | HoldfastError], sha256: dict[int, str], quarantined: set[int]
    ) -> None:
        """Each record is linked to the one before it and to the checkpoint that it was trained from."""
        for number, commit in found.items():
            if isinstance(commit, HoldfastError):
                if number not in quarantined:
                    self.problems.append(str(commit))
                continue
            name = record_name("commits", number)
            if isinstance(found.get(number - 1), Commit) and commit.previous_record_sha256 != sha256[number - 1]:
                self.problems.append(f"{name} was made after another {record_name('commits', number - 1)}")
            parent = found.get(commit.parent)
            if commit.parent >= number:
                self.problems.append(f"{name} was trained from commit {commit.parent}, which is later")
            elif isinstance(parent, Commit) and parent.checkpoint_sha256 != commit.previous_checkpoint_sha256:
                self.problems.append(f"{name} was trained from another checkpoint than that of commit {parent.number}")

    def _check_latest(self, newest: int) -> None:
        try:
            latest = read_record(self.store, Latest, "latest.json")
        except NameMissing:
            if newest:
                self.notes.append("latest.json is missing; the next attempt writes it again")
            return
        except RecordDamaged as error:
            self.problems.append(f"{error}; the next attempt writes it again")
            return
        if latest.commit < newest:
            self.notes.append(f"latest.json names commit {latest.commit} of {newest}; the next attempt renews it")

    def _check_metrics(self, commit: Commit, newest: int) -> str | None:
        expected = next((file for file in commit.files if file.name == checkpoint.METRICS), None)
        name = metrics_name(commit.number)
        folder, _, file = name.partition("/")
        with self.lock:
            self.records += 1
        try:
            found = checkpoint.hash_file(self.store, folder, file)
        except NameMissing:
            if commit.number == newest:  # a kill came before it; the next attempt copies it from the checkpoint
                return None
            return f"{name} is missing"
        if expected is None or found.sha256 == expected.sha256:
            return None
        return f"{name} is {found.sha256} but was committed as {expected.sha256}"

    def _check_signed(self, commit: Commit) -> str | None:
        try:
            check_signed(self.journal, commit, self.trusted_keys)
        except Damage as error:
            return str(error)
        return None

    def _check_checkpoint(self, commit: Commit, standing: str) -> CheckedCheckpoint | None:
        try:
            damaged = checkpoint.verify(self.store, commit, self._count)
        except NameMissing:  # it went after a look at its size
            damaged = checkpoint.verify(self.store, commit)
        problems = [str(damage) for damage in damaged]
        if self.deep and not damaged:
            problems += self._look_into(commit)
        if problems and self.journal.is_pruned(commit.number):
            return None  # retention has given it up while we read
        if standing == "counts":
            with self.lock:
                self.problems += problems
        return CheckedCheckpoint(
            commit=commit.number,
            path=commit.path,
            checkpoint_sha256=commit.checkpoint_sha256,
            size_bytes=commit.size_bytes,
            standing=standing,
            damaged=[vars(damage) for damage in damaged],
        )

    def _look_into(self, commit: Commit) -> Iterable[str]:
        """Where what the bytes say contradicts the commit."""
        try:
            checkpoint.read_payload(self.store, commit)
            metadata = checkpoint.read_metadata(self.store, commit.path)
        except (CheckpointDamaged, RecordDamaged, NameMissing) as error:
            yield str(error)
            return
        if metadata is None:
            return
        pairs = {
            "step": (commit.step, metadata.optimizer_steps_total),
            "epoch": (commit.epoch, metadata.epoch),
            "checkpoint_sha256": (commit.checkpoint_sha256, metadata.checkpoint_sha256),
            "previous_checkpoint_sha256": (commit.previous_checkpoint_sha256, metadata.previous_checkpoint_sha256),
            "config_fingerprint": (commit.config_fingerprint, metadata.config_fingerprint),
        }
        for name, (committed, saved) in pairs.items():
            if committed != saved:
                yield f"{commit.path}: {name} was saved as {saved} but committed as {committed}"
        if self.journal.read_config(commit.config_fingerprint) is None:
            yield f"commit {commit.number}: configs/{commit.config_fingerprint}.json is lost"

    def _check_uncommitted(self, committed: set[str]) -> Iterator[CheckedCheckpoint]:
        for path in self.store.list():
            if not checkpoint.is_folder_name(path) or path in committed:
                continue
            try:
                files = [checkpoint.hash_file(self.store, path, name) for name in self.store.list(path)]
            except NameMissing:  # a prune deletes it while we read
                continue
            payload = next((file for file in files if file.name == checkpoint.PAYLOAD), None)
            self.notes.append(f"{path} is named by no commit")
            yield CheckedCheckpoint(
                commit=None,
                path=path,
                checkpoint_sha256=payload.sha256 if payload else "",
                size_bytes=sum(file.size_bytes for file in files),
                standing="uncommitted",
                damaged=[],
            )

    def _count(self, size_bytes: int) -> None:
        if self.is_given_up:
            raise CancelledError
        with self.lock:
            self.done_bytes += size_bytes
            self.watch(self.done_bytes, self.total_bytes)
