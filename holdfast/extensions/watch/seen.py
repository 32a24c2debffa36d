"""Everything that a live view knows about a run, as one value."""

from dataclasses import dataclass

from holdfast.checkpoint import Metadata
from holdfast.journal import AttemptRecord, Commit, EndingRecord
from holdfast.ledger.goodput import Ledger


@dataclass(frozen=True)
class Seen:
    """The state of a run, as far as a live view has read it.

    Attributes:
        url: <store>/<run>, for commands that the view names.
        commits: the newest commits and some older ones, by number, including quarantined commits.
        newest: the highest number of a commit, even if its record can't be read.
        attempts: the newest attempts, by number; None for a record that can't be read.
        endings: the endings of these attempts, by number.
        quarantined: the numbers of all quarantined commits.
        unanswered: a line for each verdict of audits that puts the run's bytes in doubt; see `list_unanswered`.
        metadata: the metadata of the newest valid commit; None if it is lost.
        epochs: the number of epochs to train; None if the settings are lost.
        next_stop: the last step of the chunk after the newest commit; None if it isn't known.
        sign_at: the time of the newest commit or claim, on this process's monotonic clock.
        ledger: the goodput ledger so far; None if the run has too many commits to compute it.
        missing: a line for each record that is lost or damaged.
        problem: why the run can't be read at all; empty if it can.
    """

    run: str
    url: str = ""
    recipe: str = ""
    commits: tuple[Commit, ...] = ()
    newest: int = 0
    attempts: tuple[tuple[int, AttemptRecord | None], ...] = ()
    endings: tuple[EndingRecord, ...] = ()
    quarantined: tuple[int, ...] = ()
    unanswered: tuple[str, ...] = ()
    metadata: Metadata | None = None
    epochs: int | None = None
    next_stop: int | None = None
    sign_at: float = 0.0
    ledger: Ledger | None = None
    missing: tuple[str, ...] = ()
    problem: str = ""

    @property
    def head(self) -> Commit | None:
        """The newest commit that can be read and isn't quarantined."""
        return next((commit for commit in reversed(self.commits) if commit.number not in self.quarantined), None)

    @property
    def total_steps(self) -> int | None:
        return self.epochs * self.metadata.steps_per_epoch if self.epochs and self.metadata else None

    @property
    def is_complete(self) -> bool:
        """Return whether the run is trained to its end, and no later attempt has begun to extend it."""
        if self.head is None or self.total_steps is None or self.head.step < self.total_steps:
            return False
        # If the record of the head's attempt is lost, `last_attempt` is lower than `head.attempt`, or 0.
        return self.head.attempt >= self.last_attempt or self.find_ending(self.last_attempt) is not None

    @property
    def is_over(self) -> bool:
        """Return whether the view may end: the run is complete, or it was complete and has lost records since then."""
        if self.is_complete:
            return True
        ending = self.find_ending(self.last_attempt)
        is_lost = self.head is None or self.total_steps is None
        return is_lost and ending is not None and ending.reason == "completed"

    @property
    def last_attempt(self) -> int:
        return self.attempts[-1][0] if self.attempts else 0

    def find_parent(self, commit: Commit) -> Commit | None:
        """Return a commit's parent; None if the view has not read the parent."""
        return next((each for each in self.commits if each.number == commit.parent), None)

    def find_ending(self, number: int) -> EndingRecord | None:
        return next((ending for ending in self.endings if ending.number == number), None)
