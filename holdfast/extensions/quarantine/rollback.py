"""Hold a run that a faulty machine has trained, or roll the run back to before the machine's first uncertified commit.

A commit is certified if an audit on another machine has trained the commit again to the same bytes.
"""

import contextlib
import logging

from holdfast.attempt.going_back import find_verified_before, take_back
from holdfast.errors import RunHeld
from holdfast.extensions.quarantine.holds import find_hold, hold_run, release_run
from holdfast.extensions.quarantine.records import read_release
from holdfast.journal import Commit, Journal
from holdfast.journal.audits import UNREADABLE, find_certifying, list_audits, list_refused
from holdfast.journal.chains import format_numbers, list_covered
from holdfast.journal.judgement import read_verdict
from holdfast.journal.trainers import read_machines
from holdfast.journal.verdict import AuditVerdict
from holdfast.store import open_store

log = logging.getLogger(__name__)


def stop_run(journal: Journal, verdict: AuditVerdict) -> str:
    """Hold a run that a faulty machine has trained: a live attempt ends at its next commit, and no new attempt begins.

    Args:
        verdict: a verdict that names a machine.

    Returns:
        A line for a person: the run is held, or the reason why it isn't.

    Raises:
        StoreError: the store can't be written.
    """
    if _find_first(journal, verdict) is None:
        return _nothing_of(journal, verdict)
    if not hold_run(journal, verdict):
        return f"run {journal.run} isn't held: a person has released it since"
    error = RunHeld.of(journal.run, journal.store.url, verdict.describe())
    return f"{error}; {error.hint}"


def roll_back(journal: Journal, verdict: AuditVerdict) -> str:
    """Quarantine the commits that a faulty machine has trained, and all commits based on them; then release the run.

    The quarantine begins with the machine's first commit that no audit certifies. A certified commit after it doesn't
    count: it may continue wrong bytes correctly. The next attempt continues from the last commit before the quarantined
    commits. A live attempt notices the quarantine at its next commit. If no commit is to
    be quarantined, only release the run: an interrupted call may have quarantined the commits already.

    Args:
        verdict: a verdict that names a machine.

    Returns:
        A line for a person: which commits were quarantined, or why none was.
    """
    first = _find_first(journal, verdict)
    if first is None:
        return _release(journal, verdict, _nothing_of(journal, verdict))
    if find_verified_before(journal, first.number) is None:
        if _is_wrong(journal, first, verdict.host):
            return (
                f"run {journal.run} isn't rolled back: {verdict.host} has trained commit {first.number} wrongly, and "
                f"no checkpoint before it verifies; train a run of another name (--set run=NAME), or keep the bytes: "
                f"holdfast release {journal.store.url} --reason TEXT"
            )
        suspected = format_numbers([each.number for each in _list_suspected(journal, verdict)])
        return (
            f"run {journal.run} isn't rolled back: no checkpoint before commit {first.number} verifies, and "
            f"{verdict.host} has trained that commit; if the commit is right, an audit on another host certifies it "
            f"(with --from {find_base(journal, verdict)} an audit of a later one certifies all up to it); in doubt are "
            f"the commits {suspected}"
        )
    reason = f"trained by {verdict.host}, or from a commit of {verdict.host}: {verdict.describe()}"
    listed = ", ".join(map(str, take_back(journal, first.number, reason)))
    newest = journal.newest()
    assert newest is not None
    said = f"run {journal.run} is rolled back to commit {newest.number} (step {newest.step}): quarantined {listed}"
    return _release(journal, verdict, said)


def _release(journal: Journal, verdict: AuditVerdict, said: str) -> str:
    """Release a run that is held because of the verdict's machine. Return a line for a person.

    Args:
        said: a line about the run. If the run is released, the returned line says so after this text.
    """
    hold = find_hold(journal)
    if hold is None or hold.lineage.get("host", verdict.host) != verdict.host:
        return said
    release_run(journal)
    return f"{said}, and released: the next attempt trains on from its newest commit"


def _nothing_of(journal: Journal, verdict: AuditVerdict) -> str:
    return f"run {journal.run} has no commit of {verdict.host} after its newest certified commit"


def choose_to_certify(journal: Journal, verdict: AuditVerdict) -> Commit | None:
    """Return the commit to audit next on another host, to find a right commit to which the run can be rolled back.

    Call this when `roll_back` has rolled back nothing, because no commit is known to be right. The commits before the
    oldest commit known to be wrong are in doubt. Choose the newest of them first. After each audit that finds a wrong
    commit, double the distance, so that a few audits find a right one. Start the audit at the commit that `find_base`
    returns: the audit then certifies the commits before the chosen one, too.

    Args:
        verdict: a verdict that names a machine.

    Returns:
        The commit; None in four cases: the run can be rolled back already, no commit is wrong, all commits in
        doubt are wrong, or the audits of the chosen commit don't agree yet.
    """
    first = _find_first(journal, verdict)
    if first is None or not verdict.is_own or find_verified_before(journal, first.number) is not None:
        return None
    audited = list_audits(journal)
    line = [each for each in journal.candidates() if each.number >= first.number]
    wrong = [n for n, each in enumerate(line) if each.number in audited and _is_wrong(journal, each, verdict.host)]
    if not wrong:
        return None
    newest, oldest = wrong[0], wrong[-1]
    refused = list_refused(journal)
    suspected = {each.number for each in _list_suspected(journal, verdict)} - refused
    in_doubt = [each for each in line[oldest + 1 :] if each.number in suspected][: oldest - newest + 1]
    return in_doubt[-1] if in_doubt and in_doubt[-1].number not in audited else None


def _is_wrong(journal: Journal, commit: Commit, host: str) -> bool:
    """Return whether the verdict on a commit says that this machine has trained the commit wrongly."""
    found = read_verdict(journal, commit)
    return found is not None and (found.kind, found.host, found.is_own) == ("machine", host, True)


def _find_first(journal: Journal, verdict: AuditVerdict) -> Commit | None:
    """Return the first commit of the faulty machine that no audit certifies; None if there is none.

    A later commit that is certified doesn't help: it may continue the wrong bytes of the first commit correctly.
    Commits that the machine has trained since it was released from quarantine are not in doubt.
    """
    return next(iter(_list_suspected(journal, verdict)), None)


def _list_suspected(journal: Journal, verdict: AuditVerdict) -> list[Commit]:
    """Return the commits of the faulty machine that no audit certifies, oldest first."""
    released = read_release(open_store(journal.store_url), verdict)
    audits, refused = list_audits(journal), list_refused(journal)
    line = [*journal.walk_back(journal.newest())]
    # A commit that the gate refused doesn't count as certified: its bytes may be right, but no run continues from it.
    certified = {
        number for each in line if each.number in audits and each.number not in refused
        for audit in find_certifying(journal, each, audits[each.number]) for number in list_covered(audit)
    } - refused  # fmt: skip
    suspected = [each for each in reversed(line) if each.number not in certified and not journal.is_given(each)]
    since = [each for each in suspected if not released or each.created_at <= released]
    return [each for each in since if _may_be_of(journal, each, verdict.host)]


def find_base(journal: Journal, verdict: AuditVerdict) -> int:
    """Return the commit from which an audit has to begin that certifies all commits in doubt up to the audited one.

    Return 0 for the beginning of the run.
    """
    first = _find_first(journal, verdict)
    return first.parent if first is not None and not journal.is_pruned(first.parent) else 0


def _may_be_of(journal: Journal, commit: Commit, host: str) -> bool:
    """Return whether a machine may have trained a commit; True if the commit's machines are not on record."""
    with contextlib.suppress(*UNREADABLE):
        return host in read_machines(journal, commit)
    return True
