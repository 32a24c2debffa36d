"""Upkeep, the work after a commit that may take long: read the checkpoint back, and prune old checkpoints.

A process that was told to end is killed after a short grace time. So an attempt that stops leaves its upkeep to the
next attempt, like an attempt that is killed. The next attempt does the upkeep while its ranks train their first chunk,
or at once if the run is complete. The next attempt needn't read the checkpoint back, because its restore hashes every
byte.
"""

import logging
from collections.abc import Callable

from holdfast import checkpoint
from holdfast.attempt.line import Line
from holdfast.attempt.ranks import AttemptRanks
from holdfast.errors import HoldfastError
from holdfast.journal import PruneReport
from holdfast.keeping import retention

log = logging.getLogger(__name__)


class Upkeep:
    """The upkeep of one attempt's commits.

    Attributes:
        is_owed: whether an earlier commit still waits for its upkeep.
    """

    def __init__(
        self,
        line: Line,
        ranks: AttemptRanks,
        fall_back: Callable[[], None],
        find_compared: Callable[[], int],
    ) -> None:
        """
        Args:
            fall_back: a function that sets the head to the newest commit that isn't quarantined, and ends the ranks.
            find_compared: returns the number of a commit whose checkpoint a comparison still needs; 0 for none.
        """
        self._line, self._ranks, self._fall_back, self._find_compared = line, ranks, fall_back, find_compared
        self._has_read_back = self._has_told = False
        self._verified = 0  # the number of the commit that the last `read_back` has verified
        self._pruned: PruneReport | None = None
        self.is_owed = False

    def do(self) -> None:
        """Read back the newest commit if a read is due, and prune. Log a failure as a warning."""
        self.is_owed = False
        for name, act in (("reading a commit back", self.read_back), ("pruning", self.prune_epochs)):
            try:
                act()
            except Exception as error:  # the commit counts, whether or not its upkeep succeeds
                hint = f" ({error.hint})" if isinstance(error, HoldfastError) and error.hint else ""
                log.warning("%s failed: %s; the run continues%s", name, error or repr(error), hint)

    def read_back(self) -> bool:
        """Compare the newest commit's stored bytes with their hashes, if a comparison is due. Return whether it was
        due.

        It is due for an attempt's first commit, and then for every n-th, as ``checkpoint.read_back_every`` says. If a
        commit is damaged, quarantine it and let the next chunk begin from the commit before.

        Raises:
            Superseded: a later attempt owns the run.
        """
        line, every = self._line, self._ranks.config.checkpoint.read_back_every
        commit, self._verified = line.head, 0
        if commit is None:
            return False
        if commit.number == self._ranks.verified:
            self._verified = commit.number
            return False
        if not every or (self._has_read_back and commit.number % every):
            return False
        self._has_read_back = True
        if damaged := checkpoint.verify(line.journal.store, commit, is_urgent=False):
            reason = f"read back after its commit: {'; '.join(map(str, damaged))}"
            line.journal.quarantine(commit.number, reason, line.attempt)
            self._fall_back()
        else:
            self._verified = commit.number
        return True

    def prune_epochs(self) -> PruneReport | None:
        """Delete the checkpoints that retention doesn't keep. Return the report; None before the first commit.

        Raises:
            Superseded: a later attempt owns the run, perhaps with another policy.
        """
        line = self._line
        is_first = self._pruned is None  # the first prune also deletes unfinished checkpoints of earlier attempts
        self._pruned = retention.prune_by_policy(
            line.journal,
            self._ranks.config.retention,
            line.steps_per_epoch,
            attempt=line.attempt,
            verified=self._verified,
            compared=self._find_compared(),
            debris_after_s=retention.DEBRIS_AFTER_S if is_first else None,
        )
        if self._pruned is not None and self._pruned.pruned and not self._has_told:
            self._has_told = True
            log.info(
                "deleted %s: retention keeps %s; holdfast pin keeps a checkpoint for good",
                ", ".join(entry.path for entry in self._pruned.pruned),
                retention.describe_policy(self._ranks.config.retention),
            )
        return self._pruned

    def read_report(self) -> PruneReport | None:
        """Return the report of the last prune, or of a dry run if this attempt has not pruned; None if that fails."""
        if self._pruned is not None:
            return self._pruned
        policy = self._ranks.config.retention
        try:
            return retention.prune_by_policy(self._line.journal, policy, self._line.steps_per_epoch, dry_run=True)
        except HoldfastError as error:
            log.warning("%s", error)
            return None
