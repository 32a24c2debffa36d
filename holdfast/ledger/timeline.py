"""The lives of a run's attempts on one clock, computed from the run's records.

A commit records when its last step ended (``trained_at``), how long its steps took and how long its save stalled
the ranks. From these numbers the times of its steps follow. Commits of early versions have no ``trained_at``. For
these, the time of the record minus the duration of the save is used, which is exact to a few seconds.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import AttemptRecord, Commit, EndingRecord, Journal, Record, read_record, record_name, seconds_of
from holdfast.journal.endings import Ending
from holdfast.journal.reading import read_all

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Trained:
    """The steps of one commit. Times are in seconds since 1970.

    Attributes:
        commit: the commit's number.
        began: when its first step began.
        ended: when its last step ended.
        slow_s: seconds by which the previous save slowed these steps. They are part of the time between `began` and
            `ended`.
        stall_s: seconds after `ended` until training could continue.
        save_s: seconds from the copy of the state until the save was durable; 0 if unknown.
        restart_s: seconds from the start of its ranks until they began to train; 0 if unknown.
        rehearse_s: seconds that a rehearsal took before these steps, or during the first of these steps.
        steps: the number of its steps; 0 if unknown.
        reason: why the commit was made: ``chunk``, ``preempted`` or ``adopted``.
        is_last: whether its ranks ended with its save, so that no later step was lost.
        is_kept: whether the run still contains these steps: False if the commit is quarantined.
        is_after_gap: whether the commit before it in the run can't be read.
    """

    commit: int
    began: float
    ended: float
    slow_s: float
    stall_s: float
    save_s: float
    restart_s: float
    rehearse_s: float
    steps: int
    reason: str
    is_last: bool
    is_kept: bool
    is_after_gap: bool


@dataclass(frozen=True)
class Life:
    """One attempt. Times are in seconds since 1970.

    Attributes:
        began: when its ranks were started.
        claimed: when it claimed the run.
        ending: how the attempt ended; None if its ending is not on record.
        ended_at: the time of the ending's record; None if the ending has no record. If the attempt died, another
            process may have written this record.
        trained: the steps that its ranks trained and that a commit contains, even if a later attempt made that commit.
    """

    number: int
    host: str
    began: float
    claimed: float
    ending: Ending | None = None
    ended_at: float | None = None
    trained: tuple[Trained, ...] = ()


@dataclass(frozen=True)
class Usual:
    """The usual durations in a run, in seconds: medians over its commits, 0 if unknown."""

    train_s: float
    save_s: float
    restart_s: float
    step_s: float

    @classmethod
    def of(cls, trained: Sequence[Trained]) -> "Usual":
        """Return the median durations over these commits. A duration that no commit has recorded is 0."""

        def median(values: Iterable[float]) -> float:
            known = [value for value in values if value > 0]
            return statistics.median(known) if known else 0.0

        return cls(
            train_s=median(each.ended - each.began for each in trained),
            save_s=median(each.save_s for each in trained),
            restart_s=median(each.restart_s for each in trained),
            step_s=median((each.ended - each.began) / each.steps for each in trained if each.steps),
        )


@dataclass
class Records:
    """The records of a run from which its timeline is made.

    Attributes:
        missing: a line for each record that is lost or can't be read.
    """

    attempts: dict[int, AttemptRecord] = field(default_factory=dict)
    endings: dict[int, EndingRecord] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    quarantined: frozenset[int] = frozenset()
    missing: list[str] = field(default_factory=list)


def read_records(journal: Journal) -> Records:
    """Read the records of a run's attempts, endings and commits; list lost or damaged records."""
    records = Records(quarantined=frozenset(journal.numbers("quarantine")))

    def read(folder: str, cls: type[AnyRecord]) -> dict[int, AnyRecord]:
        numbers = journal.numbers(folder)
        found = read_all(lambda number: _read(journal, cls, record_name(folder, number)), numbers)
        records.missing += [each for each in found if isinstance(each, str)]
        return {number: each for number, each in zip(numbers, found, strict=True) if not isinstance(each, str)}

    records.attempts = read("attempts", AttemptRecord)
    records.endings = read("endings", EndingRecord)
    records.commits = read("commits", Commit)
    # An attempt that died has recorded no ending, so a gap among the endings doesn't mean a lost record.
    latest = journal.read_latest()
    records.missing += _find_gaps("attempts", journal.numbers("attempts"), max(records.endings, default=0))
    records.missing += _find_gaps("commits", journal.numbers("commits"), latest.commit if latest else 0)
    return records


def _find_gaps(folder: str, numbers: Sequence[int], named: int) -> list[str]:
    """Return a line for each gap in the numbers of a folder's records. Records are numbered without gaps.

    Args:
        named: the highest number that another record mentions; 0 if no record mentions a number.
    """
    numbers = [*(numbers or [max(named - 1, 0)]), named + 1]
    pairs = [(before + 1, after - 1) for before, after in itertools.pairwise(numbers) if after > before + 1]
    return [f"{record_name(folder, first)}{f' to {last:08d}' * (last > first)} is lost" for first, last in pairs]


def _read(journal: Journal, cls: type[AnyRecord], name: str) -> AnyRecord | str:
    """Return a record, or the reason why it can't be read."""
    try:
        return read_record(journal.store, cls, name)
    except NameMissing:
        return f"{name} is lost"
    except RecordDamaged as error:
        return str(error)


def make_lives(records: Records) -> list[Life]:
    """Return the attempts of a run in their order, each with the steps that its ranks trained.

    An attempt whose own record is lost is reconstructed from its commits. If it has no commits either, its time counts
    as time between attempts.
    """
    trained: dict[int, list[Trained]] = {}
    for commit in records.commits.values():
        if commit.why == "adopted" and not commit.trained_at:
            records.missing.append(f"the adopted commit {commit.number} doesn't say when its steps were trained")
            continue
        trained.setdefault(find_trainer(commit, records.attempts), []).append(_place(commit, records))
    lives = []
    for number in sorted(records.attempts.keys() | trained.keys()):
        own = tuple(sorted(trained.get(number, ()), key=lambda each: each.ended))
        life = _begin(number, records.attempts.get(number), own)
        if ending := records.endings.get(number):
            life = replace(life, ending=ending.ending, ended_at=seconds_of(ending.created_at))
        lives.append(life)
    return lives


def _begin(number: int, record: AttemptRecord | None, trained: tuple[Trained, ...]) -> Life:
    first = trained[0].began - trained[0].restart_s if trained else 0.0
    if record is None:
        return Life(number, "", first, first, trained=trained)
    claimed = seconds_of(record.created_at)
    began = seconds_of(record.began_at) if record.began_at else min(claimed, first or claimed)
    return Life(number, record.host, began, claimed, trained=trained)


def find_trainer(commit: Commit, attempts: dict[int, AttemptRecord]) -> int:
    """Return the number of the attempt whose ranks trained a commit; for an adopted commit, an earlier attempt.

    If an adopted commit doesn't record when it was trained, return the number of the attempt that adopted it.
    """
    if commit.why != "adopted" or not commit.trained_at:
        return commit.attempt
    ended = seconds_of(commit.trained_at)
    trained = {number: record for number, record in attempts.items() if record.is_training}
    earlier = [number for number, record in trained.items() if seconds_of(record.created_at) <= ended]
    return max((number for number in earlier if number <= commit.attempt), default=commit.attempt)


def _place(commit: Commit, records: Records) -> Trained:
    ended = seconds_of(commit.trained_at) if commit.trained_at else seconds_of(commit.created_at) - commit.save_s
    parent = records.commits.get(commit.parent)
    steps = commit.step - parent.step if parent else 0 if commit.parent else commit.step - commit.first_start
    return Trained(
        commit=commit.number,
        began=ended - commit.train_s,
        ended=ended,
        slow_s=min(commit.slow_s, commit.train_s),
        stall_s=commit.stall_s,
        save_s=commit.save_s,
        restart_s=commit.restart_s,
        rehearse_s=commit.rehearse_s,
        steps=max(steps, 0),
        reason=commit.why,
        is_last=commit.is_last,
        is_kept=commit.number not in records.quarantined,
        is_after_gap=commit.parent > 0 and parent is None,
    )
