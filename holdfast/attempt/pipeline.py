"""The chunks of an attempt between order and commit: the ordered stops, and the saved checkpoints without a commit."""

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint import Saved


@dataclass(frozen=True)
class Chunk:
    """The steps ``(start, stop]``; ``number`` is the number of the commit that the chunk is to become."""

    number: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"chunk {self.number}: steps {self.start}-{self.stop}"


class Pipeline:
    """The stops that the ranks were ordered to train to, and the checkpoints that are durable but not committed.

    The ranks are ordered to train the next chunk before they have saved the last one, so that neither a save nor a
    commit costs training time.
    """

    def __init__(self, choose_stop: Callable[[int], int]) -> None:
        """
        Args:
            choose_stop: returns the step at which the chunk ends that begins with a step.
        """
        self._choose_stop = choose_stop
        self._ordered: list[int] = []
        self.uncommitted: list[Saved] = []

    def stop_after(self, step: int) -> int:
        """Return the last step of the chunk that follows a step: the ordered stop, if the ranks have an order."""
        return next((stop for stop in self._ordered if stop > step), 0) or self._choose_stop(step)

    def is_new(self, stop: int) -> bool:
        """Return whether a stop was not ordered before, and note it as ordered."""
        is_new = stop not in self._ordered
        self._ordered += [stop] if is_new else []
        return is_new

    def add(self, saved: Saved) -> None:
        """Add a checkpoint that the ranks have saved."""
        self.uncommitted.append(saved)
        self._ordered = [stop for stop in self._ordered if stop > saved.step]

    def forget_orders(self) -> None:
        """Forget the ordered stops: the ranks that they were sent to are gone."""
        self._ordered = []
