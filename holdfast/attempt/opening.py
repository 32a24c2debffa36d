"""The state of a run when an attempt begins, read from the journal once."""

from dataclasses import dataclass

from holdfast.endings import Ending
from holdfast.journal import Commit, Journal
from holdfast.rank.messages import Ready


@dataclass(frozen=True)
class Known:
    """The state of a run before an attempt claims it, as the journal records it.

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

    @property
    def is_finished(self) -> bool:
        """Return whether the last attempt had done all that was left to do when it ended."""
        return self.ending is not None and self.ending.reason == "completed"

    def find_reason(self, steps_per_epoch: int, total_steps: int) -> str:
        """Return the reason why the next attempt starts: ``fresh``, ``preempted``, ``extended`` or ``continued``.

        Args:
            total_steps: how long the run is to be trained now.
        """
        if not self.attempts:
            return "fresh"
        newest, was_preempted = self.newest, self.ending is not None and self.ending.reason == "preempted"
        if was_preempted or (newest is not None and newest.why == "preempted"):
            return "preempted"
        if newest is not None and self.epochs is not None:
            return "extended" if self.epochs * steps_per_epoch <= newest.step < total_steps else "continued"
        return "continued"

    def record_lost_attempts(self, journal: Journal, number: int) -> None:
        """Record that the attempts before this one vanished, back to the last one whose ending is on record.

        Args:
            number: this attempt's.
        """
        lost = Ending("vanished", f"it had not ended when attempt {number} began", self.step)
        number = self.attempts if self.ending is None else 0
        while number and journal.has_attempt(number) and journal.end_attempt(number, lost) == lost:
            number -= 1


def describe_built(built: Ready, epochs: int) -> str:
    """Return what the ranks have built, for a person."""
    parts = [f"{built.model_params:,} parameters", f"{epochs} epochs of {built.steps_per_epoch} steps"]
    if "samples" in built.data:
        parts.insert(1, f"{built.data['samples']:,} samples")
    elif "loader_workers" in built.data:
        parts.insert(1, "a stream")
    return f"{', '.join(parts)}, on {built.device}"


def describe_beginning(head: Commit | None, total_steps: int) -> str:
    """Return where training begins, for a person."""
    if head is None:
        return f"begins with step 0 of {total_steps}"
    return f"continues from {head.path}, step {head.step} of {total_steps}"
