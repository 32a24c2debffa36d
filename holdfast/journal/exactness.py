"""The answer whether a run continues exactly, from the records of its rehearsals and its last attempt."""

from holdfast.errors import StoreError
from holdfast.journal.audits import list_unproved
from holdfast.journal.journal import Journal
from holdfast.journal.records import Commit, EndingRecord, describe_rehearsals

INEXACT = "inexact"  # the recorded reason if `holdfast.errors.Inexact` has ended an attempt


def describe_resume(journal: Journal, commit: Commit) -> str:
    """Return a sentence on a run's rehearsals up to its newest commit; see `describe_exactness`.

    An audit may have proved a resume since the commit was recorded.
    """
    try:
        number = journal.attempts()
        ended = journal.read_ending(number) if number else None
        commit = commit.model_copy(update={"unproved": list_unproved(journal, commit.unproved)})
    except StoreError:  # leave the damaged file to `verify`: the other views only need the commits
        ended = None
    return describe_exactness(commit, ended, journal.store.url)


def describe_exactness(commit: Commit, ended: EndingRecord | None, run: str) -> str:
    """Return the rehearsal verdict of a run's newest commit, or the difference that ended the last attempt.

    Args:
        ended: the ending of the last attempt; None if it hasn't ended.
        run: <store>/<run>, for the command in the verdict.
    """
    is_exact = ended is None or ended.reason != INEXACT
    return describe_rehearsals(commit, run) if ended is None or is_exact else ended.message.partition(";")[0]
