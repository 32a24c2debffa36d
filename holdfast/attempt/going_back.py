"""Going back in a run: quarantine all commits from a given number on, so that the run continues from the commit before.

Two operations use it: the rollback of a faulty machine's commits, and the skip of steps that were trained already.
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
    """Quarantine the commits from this number on. An attempt that trains now notices the quarantine at its next commit.

    Args:
        number: the first commit to quarantine. An earlier commit has to verify; see `find_verified_before`.
        stays: a function that returns True for a commit which must not be quarantined.

    Returns:
        The numbers of the quarantined commits, in their order.
    """
    done: list[int] = []
    # A live attempt may commit meanwhile. It first writes its commit's record, and then checks whether the parent is
    # quarantined. This function first quarantines, and then lists the commits again. So the attempt notices the
    # quarantine, or this function notices the commit.
    while found := [each for each in journal.candidates() if each.number >= number and not stays(each)]:
        done += [commit.number for commit in found if _quarantine(journal, commit, reason)]
    return sorted(done)


def _quarantine(journal: Journal, commit: Commit, reason: str) -> bool:
    """Quarantine a commit. Return False if a new attempt has claimed the run meanwhile: then try again."""
    try:
        journal.quarantine(commit.number, reason, journal.attempts())
    except Superseded:
        return False
    return True
