"""Long runs made in seconds: the records that training and pruning after every chunk would have left."""

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from holdfast.attempt.line import describe_latest
from holdfast.checkpoint import Saved
from holdfast.config import Retention
from holdfast.journal import (
    AttemptRecord,
    Commit,
    Journal,
    Pin,
    Pruned,
    PruneEntry,
    PruneReport,
    Quarantine,
    Record,
    metrics_name,
    now,
    read_record,
    record_name,
)
from holdfast.keeping.retention import REPORTS_TRIED
from holdfast.store import Store
from holdfast.store.local import LocalStore
from tests.support.makers import IDENTITY, SETTINGS, STEPS_PER_EPOCH, make_commit, save

T = TypeVar("T")

RUN = "run"
POLICY = Retention(keep_last=3)
AT_ONCE = 16
COMMITS_PER_ATTEMPT = 10
QUARANTINED_EVERY, QUARANTINED_AT = 100, 5


class History:
    """A run of so many commits, a commit an epoch and an attempt every ten. Its newest three checkpoints have folders.

    Attributes:
        commits: how many it has now.
    """

    def __init__(self, store: Store, commits: int) -> None:
        self.store, self.commits = store.inside(RUN), 0
        self._previous: bytes = b""
        self._saved: Saved | None = None
        journal = Journal(store, RUN)
        journal.begin("m:f")
        journal.record_config(SETTINGS, IDENTITY, {"epochs": commits, "retention": POLICY.model_dump(mode="json")})
        records: dict[str, bytes] = {}
        for number in range(1, commits + 1):
            records |= self._train(with_folder=number > commits - POLICY.keep_last)
            records |= self._prune(number)
        self._write(records)

    def train(self) -> None:
        """There is one more commit, which no prune has seen."""
        self._write(self._train(with_folder=True))

    def lose_latest(self) -> None:
        self.store.delete("latest.json")

    def lose_reports(self) -> None:
        """A prune finds no report of the one before."""
        self._each(
            lambda number: self.store.delete(record_name("prunes", number)),
            range(max(1, self.commits - REPORTS_TRIED + 1), self.commits + 1),
        )

    def quarantine(self) -> None:
        """One commit in a hundred was quarantined; such checkpoints are not pruned."""

        def quarantine(number: int) -> None:
            self._put_back(number)
            record = Quarantine(commit=number, reason="damaged", attempt=1, created_at=now())
            self.store.replace(record_name("quarantine", number), record.to_bytes())

        self._each(quarantine, range(QUARANTINED_AT, self.commits - POLICY.keep_last, QUARANTINED_EVERY))

    def pin_first(self) -> None:
        """The first checkpoint is pinned, and every prune has known it."""
        self._put_back(1)
        self.store.replace(record_name("pins", 1), Pin(commit=1, created_at=now()).to_bytes())
        name = record_name("prunes", self.commits - 1)
        report = read_record(self.store, PruneReport, name)
        protected = [*report.protected, _entry(make_commit(1), "pinned")]
        self.store.replace(name, report.model_copy(update={"protected": protected}).to_bytes())

    def _train(self, *, with_folder: bool) -> dict[str, bytes]:
        """What the next commit writes but for its checkpoint, which is on the store."""
        self.commits += 1
        number, attempt = self.commits, self.commits // COMMITS_PER_ATTEMPT + 1
        commit = make_commit(number, attempt, previous_record_sha256=_sha256(self._previous))
        parent = self._saved.metadata.checkpoint_sha256 if self._saved else commit.previous_checkpoint_sha256
        records: dict[str, bytes] = {}
        if with_folder:
            saved = self._saved = save(self.store, commit.step, parent)
            commit = commit.model_copy(
                update={
                    "path": saved.path, "files": saved.files, "previous_checkpoint_sha256": parent,
                    "checkpoint_sha256": saved.metadata.checkpoint_sha256,
                }
            )  # fmt: skip
            records["latest.json"] = describe_latest(commit, saved.metadata).to_bytes()
        self._previous = commit.to_bytes()
        records[record_name("attempts", attempt)] = AttemptRecord(
            number=attempt, why="continued", created_at=now(), host="host", pid=1, environment={}
        ).to_bytes()
        return records | {record_name("commits", number): self._previous, metrics_name(number): b'{"step": 1}\n'}

    def _prune(self, newest: int) -> dict[str, bytes]:
        """What a prune writes when a commit is the newest."""
        kept = [make_commit(number) for number in range(newest, max(newest - POLICY.keep_last, 0), -1)]
        pruned = [make_commit(newest - POLICY.keep_last)] if newest > POLICY.keep_last else []
        report = PruneReport(
            newest=newest,
            policy=POLICY.model_dump(mode="json"),
            kept=[_entry(commit, "keep_last") for commit in kept],
            protected=[],
            pruned=[_entry(commit, "") for commit in pruned],
            unreadable=[],
            unfinished=[],
            debris=[],
            dry_run=False,
            created_at=now(),
        )
        records: dict[str, Record] = {record_name("prunes", newest): report}
        records |= {record_name("pruned", commit.number): _tombstone(commit) for commit in pruned}
        return {name: record.to_bytes() for name, record in records.items()}

    def _put_back(self, number: int) -> None:
        """The checkpoint of a commit was never given up."""
        self.store.delete(record_name("pruned", number))
        save(self.store, number * STEPS_PER_EPOCH)

    def _write(self, records: dict[str, bytes]) -> None:
        if isinstance(self.store, LocalStore):  # without its fsync
            for name, data in records.items():
                path = Path(self.store.url) / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
        else:
            self._each(lambda item: self.store.replace(*item), records.items())

    def _each(self, call: Callable[[T], None], items: Iterable[T]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(call, items):
                pass


def _sha256(record: bytes) -> str:
    return hashlib.sha256(record).hexdigest() if record else ""


def _tombstone(commit: Commit) -> Pruned:
    return Pruned(
        commit=commit.number,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        created_at=now(),
    )


def _entry(commit: Commit, why: str) -> PruneEntry:
    return PruneEntry(
        commit=commit.number,
        step=commit.step,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        why=why,
    )
