"""The hold on a run that a faulty machine has trained: nothing trains the run until a person releases it.

A hold is recorded as an attempt that trains nothing. A live attempt stops at its next commit, because the hold is
newer. While the hold is the newest attempt, no attempt can train the run. A release is recorded as one more attempt
that trains nothing. The attempt after the release trains the run again.
"""

import os

from holdfast.errors import Superseded, WrongUse
from holdfast.journal.endings import Ending
from holdfast.journal.journal import Journal
from holdfast.journal.records import HELD, RELEASED, AttemptRecord, record_name, seconds_of
from holdfast.journal.verdict import AuditVerdict
from holdfast.machine.host import name_host


def find_hold(journal: Journal) -> AttemptRecord | None:
    """Return the hold of a run; None if the run isn't held."""
    return journal.find_hold(journal.attempts())


def hold_run(journal: Journal, verdict: AuditVerdict) -> bool:
    """Hold a run because a verdict names a machine, unless a person has released the run after the verdict.

    Returns:
        whether the run is held now, by this or an earlier call.

    Raises:
        StoreError: the store can't be written.
    """
    while find_hold(journal) is None:
        if _is_released(journal, verdict):
            return False
        _claim(journal, HELD, verdict.describe(), {"commit": verdict.commit, "host": verdict.host})
    return True


def release_run(journal: Journal, *, is_in_doubt: bool = False) -> None:
    """Release a run that is held, so that the next attempt trains it.

    Args:
        is_in_doubt: whether verdicts wait for an answer, for the hint if the run isn't held.

    Raises:
        WrongUse: the run isn't held.
        StoreError: the store can't be written.
    """
    hold = find_hold(journal)
    if hold is None:
        raise WrongUse(
            f"run {journal.run!r} is not held by an audit, so there is nothing to release",
            hint="to answer the audits' verdicts, give the reason: --reason TEXT"
            if is_in_doubt
            else "to continue the run, start it again; holdfast show says how its last attempt ended",
        )
    _claim(journal, RELEASED, f"from the hold of attempt {hold.number}", {"hold": hold.number})


def _claim(journal: Journal, reason: str, message: str, facts: dict[str, object]) -> None:
    """Claim the next attempt, and record its ending. Do nothing if another process claims the attempt first."""
    newest = journal.newest()
    lineage = {reason: message, **facts}
    if newest is not None:
        lineage["continues"] = {"commit": newest.number, "checkpoint_sha256": newest.checkpoint_sha256}
    number = journal.next_attempt()
    try:
        journal.claim_attempt(number, reason, name_host(), os.getpid(), {}, lineage)
    except Superseded:
        return
    journal.enter(record_name("attempts", number))  # no commit names this record, so only the index shows its loss
    last = journal.newest()  # read again, because a live attempt may have committed just before the claim
    journal.end_attempt(number, Ending(reason, message, last.step if last else 0))


def _is_released(journal: Journal, verdict: AuditVerdict) -> bool:
    """Return whether a person has released the run after the last wrong training of the machine that a verdict names.

    If a different machine had caused the hold, the release of that hold doesn't count: the person may not have known of
    this machine.
    """
    for number in range(journal.attempts(), 0, -1):
        record = journal.find_attempt(number)
        if record is not None and seconds_of(record.created_at) < seconds_of(verdict.at):
            return False
        if record is not None and record.why == RELEASED and _find_host(journal, record) in ("", verdict.host):
            return True
    return False


def _find_host(journal: Journal, release: AttemptRecord) -> str:
    """Return the machine that caused the hold which a release has ended; empty if no record names the machine."""
    number = release.lineage.get("hold")
    hold = journal.find_attempt(number) if isinstance(number, int) else None
    return str(hold.lineage.get("host", "")) if hold else ""
