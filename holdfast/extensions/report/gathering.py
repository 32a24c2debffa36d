"""Gather the records of a run for its report: read each record once, in parallel, and list the lost records.

A damaged or missing record hides no other record, and has a line in `History.problems`.
"""

import contextlib
import hashlib
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.checkpoint import SHOWN, Metadata, read_metadata
from holdfast.checkpoint.shown import Shown, read_shown
from holdfast.errors import NameMissing, RecordDamaged, RunUnknown
from holdfast.extensions.report.sketch import Sketch
from holdfast.extensions.report.trails import read_commit_trail
from holdfast.journal import (
    MAX_RECORD_BYTES,
    AttemptRecord,
    Commit,
    ConfigRecord,
    EndingRecord,
    Journal,
    PruneReport,
    Quarantine,
    Record,
    RunRecord,
    read_record,
    record_name,
)
from holdfast.journal.audits import Audits, list_audits
from holdfast.journal.links import broken_links

if TYPE_CHECKING:
    from holdfast.journal.skips import SkipRecord
    from holdfast.journal.verdict import AuditVerdict

# The number of concurrent requests: each request to a remote store may take long.
READERS = 32
# The number of trails that are in memory at once.
TRAILS_AT_ONCE = 256
# The number of newest checkpoints whose metadata is read, for the probe's values.
METADATA_READ = 24
# The maximum number of problems that the report names. Further problems are only counted.
MOST_PROBLEMS = 200

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class History:
    """Everything that a report shows of a run, read from the run's records.

    Attributes:
        record: ``run.json``; None if it is damaged.
        commits: the commits that can be read, by number.
        line: the numbers of the newest commit and of its ancestors.
        quarantined: the reason for each quarantined commit.
        deleted: the commits whose checkpoints retention deleted.
        signed: the commits that have a signature, which the report doesn't check.
        prune: the newest report of retention.
        metadata: the metadata of the newest checkpoints that still exist, by commit.
        shown: the newest text or picture that the run has shown under each name.
        verdict: the verdict on the newest audited commit; None if no commit was audited.
        certified: the commits that another host has trained again to the same bytes, each with the name of that host.
        unanswered: a line for each verdict of audits that puts the run's bytes in doubt; see `list_unanswered`.
        answered: a line for each verdict that ``holdfast release --reason`` has answered, with the reason.
        chain: up to which commit all commits are certified; see `describe_chain`.
        skips: the skip lists, by number.
        problems: a line for each record that is damaged or lost, or that contradicts an earlier commit.
    """

    run: str
    url: str
    record: RunRecord | None
    snapshot: ConfigRecord | None
    attempts: dict[int, AttemptRecord]
    endings: dict[int, EndingRecord]
    commits: dict[int, Commit]
    line: frozenset[int]
    quarantined: dict[int, str]
    deleted: frozenset[int]
    pinned: frozenset[int]
    signed: frozenset[int]
    prune: PruneReport | None
    metadata: dict[int, Metadata]
    sketch: Sketch
    shown: list[Shown] = field(default_factory=list)
    verdict: "AuditVerdict | None" = None
    certified: dict[int, str] = field(default_factory=dict)
    unanswered: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    chain: str = ""
    skips: dict[int, "SkipRecord"] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def newest(self) -> Commit | None:
        """The commit that the run would continue from; None if no commit can be used."""
        counting = self.commits.keys() - self.quarantined.keys() - self.deleted
        return self.commits[max(counting)] if counting else None

    @property
    def newest_metadata(self) -> Metadata | None:
        """The metadata of the newest commit; None if it is lost."""
        return self.metadata.get(self.newest.number) if self.newest else None

    @property
    def epochs(self) -> int | None:
        """The number of epochs that the run was last trained with; None if it is unknown."""
        epochs = self.snapshot.config.get("epochs") if self.snapshot else None
        return epochs if isinstance(epochs, int) else None

    @property
    def total_steps(self) -> int | None:
        """The number of steps in the epochs that the run was last trained with; None if it is unknown."""
        metadata = self.newest_metadata
        return self.epochs * metadata.steps_per_epoch if self.epochs is not None and metadata else None

    @property
    def is_complete(self) -> bool:
        """Return whether the run has committed all steps that its last settings plan."""
        return bool(self.total_steps and self.newest and self.newest.step >= self.total_steps)


class Gatherer:
    """Reads the records of one run. A second call of `gather` reads only new records."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, Record] = {}  # records that never change, by name
        self._hashes: dict[int, str] = {}  # the hash of each commit's record
        self._drawn: set[int] = set()
        self._lost: dict[str, str] = {}
        self._sketch = Sketch()

    def gather(self) -> History:
        """Read the run's new records, and return its history.

        Raises:
            RunUnknown: no record of such a run exists.
            WrongUse: a later version of Holdfast wrote the run.
        """
        journal = self._journal
        record = self._read_run()
        with ThreadPoolExecutor(READERS) as pool:
            attempts = self._read_all(pool, AttemptRecord, "attempts")
            endings = self._read_all(pool, EndingRecord, "endings")
            quarantined = self._read_all(pool, Quarantine, "quarantine")
            skips = self._read_skips(pool)
            deleted, pinned = frozenset(journal.numbers("pruned")), frozenset(journal.numbers("pins"))
            commits = self._read_all(pool, Commit, "commits")
            counting = sorted(commits.keys() - quarantined.keys() - deleted)
            metadata = self._read_metadata(pool, [commits[number] for number in counting[-METADATA_READ:]])
            self._draw(pool, commits)
        audits = list_audits(journal)
        shown = self._read_shown([commits[number] for number in sorted(commits.keys() - quarantined.keys())])
        return History(
            run=journal.run,
            url=journal.store.url,
            record=record,
            snapshot=journal.read_snapshot(),
            attempts=attempts,
            endings=endings,
            commits=commits,
            line=find_line(commits, max(counting, default=max(commits, default=0))),
            quarantined={number: each.reason for number, each in quarantined.items()},
            deleted=deleted,
            pinned=pinned,
            signed=self._list_signed(),
            prune=self._read_prune(),
            metadata=metadata,
            sketch=self._sketch,
            shown=shown,
            skips=skips,
            problems=self._list_problems(record, commits),
            **self._judge(commits, audits) if audits else {},
        )

    def _judge(self, commits: dict[int, Commit], audits: Audits) -> dict[str, Any]:
        """Return the fields of a `History` that audits decide."""
        # imported late, because few runs are audited
        from holdfast.journal.answers import describe_answered, describe_unanswered
        from holdfast.journal.chains import describe_chain, list_certified, read_newest_verdict

        journal = self._journal
        return {
            "verdict": read_newest_verdict(journal, audits),
            "certified": list_certified(journal, commits, audits),
            "unanswered": describe_unanswered(journal, audits),
            "answered": describe_answered(journal, audits),
            "chain": describe_chain(journal, audits),
        }

    def _read_skips(self, pool: Executor) -> dict[int, "SkipRecord"]:
        if not self._journal.numbers("skips"):
            return {}
        from holdfast.journal.skips import SKIPS, SkipRecord  # few runs skip steps

        return self._read_all(pool, SkipRecord, SKIPS)

    def _read_run(self) -> RunRecord | None:
        try:
            return self._journal.read_run()
        except RunUnknown:
            if not self._journal.numbers("commits") and not self._journal.numbers("attempts"):
                raise
            self._lost["run.json"] = "run.json is missing"
        except RecordDamaged as error:
            self._lost["run.json"] = str(error)
        return None

    def _read_all(self, pool: Executor, cls: type[AnyRecord], folder: str) -> dict[int, AnyRecord]:
        """Return the readable records of a folder, by number."""
        numbers = self._journal.numbers(folder)
        new = [
            number for number in numbers if record_name(folder, number) not in self._known.keys() | self._lost.keys()
        ]
        for number, found in zip(new, pool.map(lambda each: self._read(cls, folder, each), new), strict=True):
            name = record_name(folder, number)
            if isinstance(found, str):
                self._lost[name] = found
            else:
                self._known[name] = found
        known = {number: self._known.get(record_name(folder, number)) for number in numbers}
        return {number: each for number, each in known.items() if isinstance(each, cls)}

    def _read(self, cls: type[AnyRecord], folder: str, number: int) -> AnyRecord | str:
        """Return a record, or a line that says why it can't be read."""
        name = record_name(folder, number)
        try:
            data = self._journal.store.read(name, 0, MAX_RECORD_BYTES + 1)
            record = cls.from_bytes(data, name)
        except (NameMissing, RecordDamaged) as error:
            return str(error)
        if isinstance(record, Commit):
            if record.number != number:
                return f"{name} contains the record of a different commit, {record.number}"
            self._hashes[number] = hashlib.sha256(data).hexdigest()
        return record

    def _read_metadata(self, pool: Executor, commits: list[Commit]) -> dict[int, Metadata]:
        def read(commit: Commit) -> Metadata | str | None:
            name = f"{commit.path}/metadata.json"
            known = self._known.get(name)
            if isinstance(known, Metadata):
                return known
            try:
                return read_metadata(self._journal.store, commit.path)
            except RecordDamaged as error:
                return str(error)

        found: dict[int, Metadata] = {}
        for commit, each in zip(commits, pool.map(read, commits), strict=True):
            name = f"{commit.path}/metadata.json"
            if isinstance(each, Metadata):
                found[commit.number] = each
                self._known[name] = each
            elif not self._journal.is_pruned(commit.number):
                self._lost[name] = each or f"{name} is missing"
        return found

    def _draw(self, pool: Executor, commits: dict[int, Commit]) -> None:
        """Add the trails of new commits to the curves."""
        new = sorted(commits.keys() - self._drawn)
        for start in range(0, len(new), TRAILS_AT_ONCE):
            numbers = new[start : start + TRAILS_AT_ONCE]
            trails = pool.map(lambda number: read_commit_trail(self._journal.store, commits[number]), numbers)
            for number, trail in zip(numbers, trails, strict=True):
                for name, (steps, values) in trail.columns.items():
                    self._sketch.add(number, name, steps, values)
                if trail.problem:
                    self._lost[trail.name] = trail.problem
                self._sketch.settle()
                self._drawn.add(number)

    def _read_shown(self, commits: list[Commit]) -> list[Shown]:
        """Return the texts and pictures of the newest commit that has any: for each name, only the last."""
        commit = next((each for each in reversed(commits) if any(file.name == SHOWN for file in each.files)), None)
        if commit is None:
            return []
        try:
            return list({each.name: each for each in read_shown(self._journal, commit)}.values())
        except RecordDamaged as error:
            self._lost["shown"] = str(error)
        return []

    def _list_signed(self) -> frozenset[int]:
        names = self._journal.store.list("signatures")
        return frozenset(int(name[:8]) for name in names if name[:8].isdecimal())

    def _list_problems(self, record: RunRecord | None, commits: dict[int, Commit]) -> list[str]:
        problems = [*self._lost.values(), *self._find_gaps(record), *self._check_links(commits)]
        if len(problems) > MOST_PROBLEMS:
            problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS} further problems"]
        return problems

    def _read_prune(self) -> PruneReport | None:
        for number in reversed(self._journal.numbers("prunes")):
            with contextlib.suppress(NameMissing, RecordDamaged):
                return read_record(self._journal.store, PruneReport, record_name("prunes", number))
        return None

    def _find_gaps(self, record: RunRecord | None) -> Iterable[str]:
        """Yield a line for each commit and attempt whose record is missing."""
        for folder, first in (("commits", record.first_commit if record else 1), ("attempts", 1)):
            there = self._journal.numbers(folder)
            if there and first <= there[0]:
                missing = sorted(set(range(first, there[-1])) - set(there))
                yield from (f"{record_name(folder, number)} is missing" for number in missing[: MOST_PROBLEMS + 1])

    def _check_links(self, commits: dict[int, Commit]) -> Iterable[str]:
        for number, commit in sorted(commits.items()):
            before = commits.get(number - 1)
            yield from broken_links(commit, before, self._hashes.get(number - 1, ""), commits.get(commit.parent))


def find_line(commits: dict[int, Commit], newest: int) -> frozenset[int]:
    """Return the numbers of a commit and of its ancestors, as far as their records can be read.

    A lost record doesn't end the list: the list continues with the newest earlier commit whose step is lower.
    """
    line, number, step = set[int](), newest, None
    while number > 0:
        commit = commits.get(number)
        if commit is None:
            number -= 1
            continue
        if step is None or commit.step < step:
            line.add(number)
            step = commit.step
            number = min(commit.parent, number - 1)
        else:
            number -= 1
    return frozenset(line)
