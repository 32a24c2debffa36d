"""The verdicts on the commits of a run whose steps audits have trained."""

from collections.abc import Iterator
from dataclasses import replace

from holdfast.journal.audits import UNREADABLE, Audits, list_audits, read_audits
from holdfast.journal.journal import Journal
from holdfast.journal.records import Commit
from holdfast.journal.trainers import list_trainers, read_machines
from holdfast.journal.verdict import Ask, AuditVerdict, judge_commit


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


def _count_agreeing(journal: Journal, audits: Audits) -> int:
    """Return how many of these audits ended with the bytes of the commits that they audit."""
    commits = ((journal.find_commit(number), numbers) for number, numbers in audits.items())
    return sum(
        audit.checkpoint_sha256 == commit.checkpoint_sha256
        for commit, numbers in commits
        if commit
        for audit in read_audits(journal, commit.number, numbers)
    )
