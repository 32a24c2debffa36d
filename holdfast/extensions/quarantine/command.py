"""The command ``release``: let a run that audits hold train again, or answer the audits' verdicts."""

from holdfast.errors import WrongUse
from holdfast.extensions.quarantine.holds import find_hold, release_run
from holdfast.extensions.quarantine.rollback import roll_back
from holdfast.journal import AttemptRecord, Journal
from holdfast.journal.answers import list_unanswered, record_answer
from holdfast.journal.finding import open_journal
from holdfast.journal.judgement import read_verdict
from holdfast.terminal.options import Flag


def release(run: str, /, *, rollback: Flag = False, reason: str = "") -> None:
    """Release a run that audits hold because a machine that computes wrongly has trained it; or answer the audits'
    verdicts.

    The next attempt continues from the newest commit, as if the audits had found nothing. With a reason, the verdicts
    that put the run's bytes in doubt are answered: show, watch, the report and verify don't repeat them, until a later
    audit of their commits. A run that isn't held trains on meanwhile.

    Args:
        run: <store>/<run>.
        rollback: First quarantine the commits of the machine from its first commit on that no audit certifies. The run
            then continues from the commit before.
        reason: Why the run may keep these bytes. The reason stays on record.
    """
    journal = open_journal(run)
    journal.read_run()
    hold = find_hold(journal)
    if hold is not None and rollback:
        _roll_back(journal, hold)
        return
    unanswered = list_unanswered(journal)
    for each in unanswered if reason else ():
        record_answer(journal, each.commit, reason)
        print(f"answered: {each.describe()}")
    if hold is not None or not (unanswered and reason):
        release_run(journal, is_in_doubt=bool(unanswered))
        print(f"run {journal.run} is released: the next attempt continues from its newest commit")


def _roll_back(journal: Journal, hold: AttemptRecord) -> None:
    number = hold.lineage.get("commit")
    commit = journal.find_commit(number) if isinstance(number, int) else None
    verdict = read_verdict(journal, commit) if commit else None
    if verdict is None or verdict.kind != "machine":
        raise WrongUse(
            f"run {journal.run!r} can't be rolled back, because its audits no longer blame a machine",
            hint="holdfast show prints their verdict; holdfast release without --rollback continues the run from its "
            "newest commit",
        )
    print(roll_back(journal, verdict))
    journal.check_held(journal.attempts())
