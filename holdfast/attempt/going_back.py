"""The way back of a run: quarantine its commits from one of them on, so that it continues from the one before.

A rollback of what a faulty machine has trained, and a skip of steps that were trained already, both go this way.
"""

from collections.abc import Callable

from holdfast import checkpoint
from holdfast.errors import Superseded
from holdfast.journal import Commit, Journal


def find_verified_before(journal: Journal, number: int) -> Commit | None:
    """Return the newest commit before this number that counts and whose checkpoint verifies; None if there is none."""
    before = (commit for commit in journal.candidates() if commit.number < number)
    return next((commit for commit in before if not checkpoint.verify(journal.store, commit)), None)


def take_back(
    journal: Journal, number: int, reason: str, stays: Callable[[Commit], bool] = lambda commit: False
) -> list[int]:
    """Quarantine the commits that count from this number on. An attempt that trains now notices at its next commit.

    Args:
        number: the first commit that doesn't count any more; an earlier one has to verify, see `find_verified_before`.
        stays: returns whether a commit from this number on counts all the same.

    Returns:
        The numbers of the commits, in their order.
    """
    done: list[int] = []
    # A live attempt commits meanwhile: it first writes its record and then looks for the quarantine of its parent, and
    # this does the reverse, so that at least one of them sees the other.
    while found := [each for each in journal.candidates() if each.number >= number and not stays(each)]:
        done += [commit.number for commit in found if _quarantine(journal, commit, reason)]
    return sorted(done)


def _quarantine(journal: Journal, commit: Commit, reason: str) -> bool:
    """Quarantine a commit; return False if an attempt has begun just now, so that it has to be tried again."""
    try:
        journal.quarantine(commit.number, reason, journal.attempts())
    except Superseded:
        return False
    return True
