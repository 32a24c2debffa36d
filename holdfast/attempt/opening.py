"""What the journal says of a run when an attempt begins, read once."""

from dataclasses import dataclass

from holdfast.endings import Ending
from holdfast.journal import Commit, Journal


@dataclass(frozen=True)
class Known:
    """What the journal says of a run before an attempt claims it.

    Attributes:
        attempts: the highest number that was claimed; 0 for none.
        newest: the newest commit; None before the first.
        epochs: how long the run was last asked to train; None where that was lost, or never asked.
        ending: how the attempt before this one ended; None where nobody has recorded it.
    """

    attempts: int
    newest: Commit | None
    epochs: int | None
    ending: Ending | None

    @classmethod
    def read(cls, journal: Journal) -> "Known":
        """Read how a run stands."""
        attempts, newest = journal.attempts(), journal.newest()
        record = journal.read_ending(attempts) if attempts else None
        epochs = journal.read_epochs() if attempts else None
        return cls(attempts, newest, epochs, record.ending if record else None)

    @property
    def step(self) -> int:
        """The newest step that is committed."""
        return self.newest.step if self.newest else 0

    def say_why(self, steps_per_epoch: int) -> str:
        """Return why the next attempt starts: ``fresh``, ``preempted``, ``extended`` or ``continued``."""
        if not self.attempts:
            return "fresh"
        newest, was_preempted = self.newest, self.ending is not None and self.ending.reason == "preempted"
        if was_preempted or (newest is not None and newest.why == "preempted"):
            return "preempted"
        if newest is not None and self.epochs is not None and newest.step >= self.epochs * steps_per_epoch:
            return "extended"
        return "continued"
