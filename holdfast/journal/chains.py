"""The certified commits of a run as a chain, and the verdicts that put its bytes in doubt."""

from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from holdfast.journal.audits import Audits, find_certifying, list_audits
from holdfast.journal.journal import Journal
from holdfast.journal.judgement import ask_before_parent, judge_by_audits, read_verdict
from holdfast.journal.records import AuditRecord, Commit
from holdfast.journal.verdict import AuditVerdict


def find_certified(
    journal: Journal, commits: Iterable[Commit], audits: Audits | None = None
) -> tuple[Commit, AuditRecord] | None:
    """Return the first certified commit, and the audit that certifies the commit; None if no commit is certified.

    An audit certifies a commit if the audit ended with the commit's bytes, on a different host than the training: a
    machine that computes wrongly could repeat its own fault. A commit after a commit whose bytes are in doubt is not
    certified, because it may continue wrong bytes correctly.

    Args:
        commits: the commits to look at, in this order.
        audits: the result of `list_audits`; None to read it from the journal.
    """
    audits = list_audits(journal) if audits is None else audits
    doubted = find_first_doubt(journal, audits) if audits else 0
    for commit in commits if audits else ():
        if not doubted or commit.number < doubted:
            for audit in find_certifying(journal, commit, audits.get(commit.number, ())):
                return commit, audit
    return None


def describe_certified(journal: Journal, audits: Audits | None = None) -> str:
    """Return a line for a person about the newest certified commit; empty if no commit is certified.

    Args:
        audits: the result of `list_audits`; None to read it from the journal.
    """
    audits = list_audits(journal) if audits is None else audits
    found = find_certified(journal, journal.candidates(), audits)
    if found is None:
        return ""
    commit, audit = found
    newest = journal.newest()
    rest = "" if newest is not None and newest.number == commit.number else "; later commits are candidates"
    return f"commit {commit.number} (step {commit.step}): {audit.host} has trained it again to the same bytes{rest}"


def describe_chain(journal: Journal, audits: Audits | None = None) -> str:
    """Return a text: up to which commit all commits are certified, or which of the earlier commits aren't.

    Return an empty text if no commit is certified.
    """
    audits = list_audits(journal) if audits is None else audits
    found = find_certified(journal, journal.candidates(), audits)
    if found is None:
        return ""
    unaudited = list_unaudited(journal, found[0], audits)
    if not unaudited:
        return f"each commit up to {found[0].number} is certified"
    return f"not certified before commit {found[0].number}: {format_numbers(unaudited)}"


def list_certified(journal: Journal, commits: Mapping[int, Commit], audits: Audits | None = None) -> dict[int, str]:
    """Return the numbers of the certified commits, each with a host that has trained the commit's steps again.

    Args:
        commits: the commits to look at, by number.
        audits: the result of `list_audits`; None to read it from the journal.
    """
    audits = list_audits(journal) if audits is None else audits
    doubted = find_first_doubt(journal, audits)
    known = [commits[number] for number in sorted(audits) if number in commits and (not doubted or number < doubted)]
    found = {each.number: next(find_certifying(journal, each, audits[each.number]), None) for each in known}
    return {number: audit.host for number, audit in found.items() if audit}


def list_unaudited(journal: Journal, commit: Commit, audits: Audits) -> list[int]:
    """Return the numbers of the commits before a certified commit whose steps no audit has trained to the same bytes.

    If there are none, the whole chain up to the commit is certified.
    """
    left = {each for each in journal.numbers("commits") if each < commit.number} - {*journal.numbers("quarantine")}
    for number in audits:
        each = journal.find_commit(number) if number <= commit.number else None
        if each is not None:
            left.difference_update(*(list_covered(audit) for audit in find_certifying(journal, each, audits[number])))
    first = journal.find_commit(min(left)) if left else None
    return sorted(left - ({first.number} if first is not None and journal.is_given(first) else set()))


def list_covered(audit: AuditRecord) -> range:
    """Return the numbers of the commits whose steps an audit has trained; an audit may begin before the parent."""
    return range(min(audit.from_commit, audit.commit - 1) + 1, audit.commit + 1)


def format_numbers(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, with consecutive ones as ranges: ``1, 3-5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def read_newest_verdict(journal: Journal, audits: Audits | None = None) -> AuditVerdict | None:
    """Return the verdict on the newest commit that has an audit and still counts; None if there is no such commit.

    If that verdict asks for an audit of an earlier commit that has a verdict, return the earlier commit's verdict. If
    the certified commit comes after a commit in doubt, return the verdict on the commit in doubt.

    Args:
        audits: the result of `list_audits`; None to read it from the journal.
    """
    audited = list_audits(journal) if audits is None else audits
    commit = next((each for each in journal.candidates() if each.number in audited), None) if audited else None
    verdict = read_verdict(journal, commit, audited) if commit else None
    # The loop ends even if a forged record names a later commit as the parent.
    while verdict and verdict.ask and verdict.ask.commit < verdict.commit:
        commit = journal.find_commit(verdict.ask.commit)
        earlier = read_verdict(journal, commit, audited) if commit else None
        if earlier is None:
            break
        verdict = earlier
    if verdict and verdict.kind == "certified":
        return next((each for each in list_doubts(journal, audited) if each.commit < verdict.commit), verdict)
    return verdict


def find_first_doubt(journal: Journal, audits: Audits) -> int:
    """Return the number of the first commit whose bytes audits put in doubt; 0 if there is none. See `list_doubts`."""
    return next((each.commit for each in list_doubts(journal, audits)), 0)


def list_doubts(journal: Journal, audits: Audits | None = None) -> list[AuditVerdict]:
    """Return the verdicts that put the bytes of a commit in doubt, oldest commit first.

    Quarantined commits are left out, unless a commit that counts continues from them. Two machines that agree on a
    commit's bytes refute a third machine: then the verdict is about that machine and not about the commit.

    Args:
        audits: the result of `list_audits`; None to read it from the journal.
    """
    audits = list_audits(journal) if audits is None else audits
    quarantined = {*journal.numbers("quarantine")} if audits else set()
    found = (_read_known(journal, number, audits) for number in sorted(audits))
    doubts = [each for each in found if each and each.is_doubt]
    counting = [each for each in journal.numbers("commits") if each not in quarantined] if doubts else []
    return [each for each in doubts if each.commit not in quarantined or _is_continued(journal, each.commit, counting)]


def _is_continued(journal: Journal, number: int, counting: Sequence[int]) -> bool:
    """Return whether a commit that counts was trained from this commit, directly or through later commits.

    Args:
        counting: the sorted numbers of the commits that count. Only the first commit after the given one has to be
            checked, because all later commits continue from it, or from a commit before it.
    """
    commit = journal.find_commit(next((each for each in counting if each > number), 0))
    while commit is not None and commit.number > number:
        commit = journal.find_parent(commit)
    return commit is not None and commit.number == number


# For each journal: the verdict by the audits of one commit, by its number and its newest audit. Records never change,
# and retention asks after each commit.
_judged: WeakKeyDictionary[Journal, dict[tuple[int, int], AuditVerdict]] = WeakKeyDictionary()


def _read_known(journal: Journal, number: int, audits: Audits) -> AuditVerdict | None:
    known, key = _judged.setdefault(journal, {}), (number, max(audits[number]))
    if key in known:
        return known[key]
    commit = journal.find_commit(number)
    verdict = judge_by_audits(journal, commit, audits) if commit else None
    if commit and verdict and verdict.ask and verdict.ask.commit == commit.parent:
        return ask_before_parent(journal, commit, verdict, audits)  # depends on the audits of the parent, too
    if verdict:
        known[key] = verdict
    return verdict
