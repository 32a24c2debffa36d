"""A run's audits, and the verdicts on the commits whose steps they have trained."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from holdfast.errors import NameMissing, NameTaken, RecordDamaged, Unreadable
from holdfast.journal.journal import Journal
from holdfast.journal.records import AttemptRecord, AuditRecord, Commit, audit_name, read_record, record_name
from holdfast.journal.verdict import OTHER_NODE, Ask, AuditVerdict, judge_commit, list_machines

NAME = re.compile(r"(\d{8})-(\d{8})\.json")
UNREADABLE = (NameMissing, RecordDamaged, Unreadable)

# For each commit that has audits, by number: the numbers of its audits.
Audits = dict[int, list[int]]


def list_audits(journal: Journal) -> Audits:
    """Return, with one request, the numbers of the audits of each commit that has audits."""
    found: Audits = {}
    for name in map(NAME.fullmatch, journal.store.list("audits")):
        if name:
            found.setdefault(int(name[1]), []).append(int(name[2]))
    return found


def read_audits(journal: Journal, commit: int, numbers: Iterable[int]) -> Iterator[AuditRecord]:
    """Yield the audits of a commit; skip records that can't be read, and those of another commit."""
    for number in numbers:
        with contextlib.suppress(*UNREADABLE):
            audit = read_record(journal.store, AuditRecord, audit_name(commit, number))
            if audit.commit == commit:  # a forged number may be 10**15, of which readers make a range
                yield audit


def record_audit(journal: Journal, audit: AuditRecord) -> AuditRecord:
    """Write the record of an audit under the next free number of its commit, and return it.

    Raises:
        StoreError: the store can't be written.
    """
    number = max(list_audits(journal).get(audit.commit, [0]))
    while True:
        number += 1
        audit = audit.model_copy(update={"number": number})
        with contextlib.suppress(NameTaken):  # an audit on another machine took this number first
            journal.store.create(audit_name(audit.commit, number), audit.to_bytes())
            journal.enter(audit_name(audit.commit, number))
            return audit


def find_certifying(journal: Journal, commit: Commit, numbers: Iterable[int]) -> Iterator[AuditRecord]:
    """Yield the audits that certify a commit, among the commit's audits with these numbers; see `find_certified`."""
    for audit in read_audits(journal, commit.number, numbers):
        with contextlib.suppress(*UNREADABLE):
            is_same = audit.checkpoint_sha256 == commit.checkpoint_sha256
            hosts = read_machines(journal, commit) if is_same else frozenset()
            if is_same and not hosts & {audit.host, OTHER_NODE}:
                yield audit


def list_unproved(journal: Journal, numbers: Iterable[int]) -> list[int]:
    """Return the commits whose resume is unproved: no audit trained through it without a resume to the same bytes."""
    audits, left = list_audits(journal) if (known := [*numbers]) else {}, []
    for number in known:
        commit = journal.find_commit(number)
        found = read_audits(journal, number, audits.get(number, ()))
        if commit is None or not any(e.resumes and e.checkpoint_sha256 == commit.checkpoint_sha256 for e in found):
            left.append(number)
    return left


def list_trainers(journal: Journal, commit: Commit) -> list[AttemptRecord]:
    """Return the attempts that may have trained a commit.

    Raises:
        NameMissing: an attempt's record is lost, or belongs to the run from which this commit was unpacked.
        RecordDamaged: an attempt's record is damaged, or no attempt that trains can have trained the commit.
        Unreadable: an attempt's record can't be read.
    """
    if journal.is_unpacked(commit):
        raise NameMissing(f"run {journal.run!r} has no record of the machine that trained commit {commit.number}")
    first = commit.attempt
    if commit.why == "adopted":
        # The ranks of an earlier attempt trained the commit. If several attempts began since the parent's commit, no
        # record says which attempt's ranks that were.
        first = journal.first_attempt_after(journal.find_parent(commit))
    attempts = [_read_committed(journal, commit, number) for number in range(first, commit.attempt + 1)]
    trainers = [attempt for attempt in attempts if attempt.is_training]
    if not trainers:
        name = record_name("commits", commit.number)
        raise RecordDamaged(f"{name} names attempt {commit.attempt}, which can't have trained it")
    return trainers


def _read_committed(journal: Journal, commit: Commit, number: int) -> AttemptRecord:
    """Return the record of an attempt that trained a commit.

    Raises:
        RecordDamaged: the record isn't the one that the commit names.
    """
    name = record_name("attempts", number)
    record, expected = journal.read_attempt(number), commit.records.get(name, "")
    if expected and journal.hash_once(name) != expected:
        raise RecordDamaged(
            f"{name} isn't the record on which commit {commit.number} rests: it was changed",
            hint="holdfast verify names the changed records",
        )
    return record


def read_machines(journal: Journal, commit: Commit) -> frozenset[str]:
    """Return the hosts that may have trained a commit; see `list_machines`.

    Raises:
        NameMissing, RecordDamaged, Unreadable: an attempt's record can't be read.
    """
    return list_machines(commit, list_trainers(journal, commit))


def may_follow_resume(parent: Commit, commit: Commit) -> bool:
    """Return whether the training of a commit's steps may have begun with a resume from the commit's parent.

    If two commits of one attempt differ in ``restart_s``, the attempt restarted its ranks between them. For an adopted
    commit return True, because no record says when the ranks that saved its checkpoint were started.
    """
    times = {parent.restart_s, commit.restart_s} - {0.0}
    return parent.attempt != commit.attempt or "adopted" in (parent.why, commit.why) or len(times) > 1


def read_verdict(journal: Journal, commit: Commit, audits: Audits | None = None) -> AuditVerdict | None:
    """Return the verdict on a commit; None if the commit has no audit, or if its attempt's record can't be read.

    Args:
        audits: the result of `list_audits`; None to read it from the journal.
    """
    numbers = list_audits(journal) if audits is None else audits
    verdict = judge_by_audits(journal, commit, numbers)
    if verdict is None:
        return None
    if verdict.ask and verdict.ask.commit == commit.parent:
        return ask_before_parent(journal, commit, verdict, numbers)
    if verdict.kind != "machine":
        return verdict
    return verdict.count_earlier(_count_agreeing(journal, {**numbers, commit.number: []}))


def judge_by_audits(journal: Journal, commit: Commit, audits: Audits) -> AuditVerdict | None:
    """Return the verdict from the commit's own audits; None without audits, or if an attempt's record is lost."""
    if commit.number not in audits:
        return None
    try:
        trainers = list_trainers(journal, commit)
    except UNREADABLE:
        return None
    return judge_commit(commit, trainers, list(read_audits(journal, commit.number, audits[commit.number])))


def ask_before_parent(journal: Journal, commit: Commit, verdict: AuditVerdict, audits: Audits) -> AuditVerdict:
    """Return a verdict that asks for an audit of the parent.

    If the parent is already certified, ask for a replay of the commit that begins before the parent instead. The gate
    (the checks before a resume) refuses to begin with the parent, so only this replay can show whether the commit is
    right.
    """
    parent = journal.find_parent(commit)
    found = judge_by_audits(journal, parent, audits) if parent else None
    if parent is None or found is None or found.kind != "certified":
        return verdict
    hosts = read_machines(journal, commit)
    ask = Ask(commit.number, from_commit=parent.parent, answered=tuple(sorted(hosts)))
    return replace(verdict, reason=f"{verdict.reason}, though that commit is certified", ask=ask)


def list_waiting(journal: Journal, parent: int) -> Iterator[Ask]:
    """Yield the replays of a certified commit's children that the verdicts on these children ask for."""
    audits = list_audits(journal)
    for number in audits:
        commit = journal.find_commit(number) if number > parent else None
        verdict = read_verdict(journal, commit, audits) if commit and commit.parent == parent else None
        if verdict and verdict.ask and verdict.ask.commit == number and verdict.ask.from_commit is not None:
            yield verdict.ask


def list_refused(journal: Journal) -> set[int]:
    """Return the commits that the gate (the checks before a resume) refused when an audit was to begin from them."""
    audits = (each for number, known in list_audits(journal).items() for each in read_audits(journal, number, known))
    return {audit.from_commit for audit in audits if not audit.checkpoint_sha256}


def _count_agreeing(journal: Journal, audits: Audits) -> int:
    """Return how many of these audits ended with the bytes of the commits that they audit."""
    commits = ((journal.find_commit(number), numbers) for number, numbers in audits.items())
    return sum(
        audit.checkpoint_sha256 == commit.checkpoint_sha256
        for commit, numbers in commits
        if commit
        for audit in read_audits(journal, commit.number, numbers)
    )
