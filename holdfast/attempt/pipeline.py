"""The chunks that an attempt has ordered but not committed: their last steps, and the checkpoints already saved."""

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint import Saved


@dataclass(frozen=True)
class Chunk:
    """The steps ``(start, stop]``. ``number`` is the number that the chunk's commit will have."""

    number: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"chunk {self.number}: steps {self.start}-{self.stop}"


class Pipeline:
    """The steps at which the ranks were ordered to stop and save, and the durable checkpoints without a commit.

    The ranks get the order for the next chunk before they have saved the last chunk, so that neither a save nor a
    commit costs training time.
    """

    def __init__(self, choose_stop: Callable[[int], int]) -> None:
        """
        Args:
            choose_stop: a function that returns the last step of a chunk, given the step after which the chunk begins.
        """
        self._choose_stop = choose_stop
        self._ordered: list[int] = []
        self.uncommitted: list[Saved] = []

    def stop_after(self, step: int) -> int:
        """Return the last step of the chunk that begins after ``step``.

        If the ranks already have an order to stop, return the step of this order.
        """
        return next((stop for stop in self._ordered if stop > step), 0) or self._choose_stop(step)

    def is_new(self, stop: int) -> bool:
        """Note that the ranks have the order to stop at a step. Return whether this order is new."""
        is_new = stop not in self._ordered
        self._ordered += [stop] if is_new else []
        return is_new

    def add(self, saved: Saved) -> None:
        """Add a checkpoint that the ranks have saved."""
        self.uncommitted.append(saved)
        self._ordered = [stop for stop in self._ordered if stop > saved.step]

    def forget_orders(self) -> None:
        """Forget the ordered stops. Call it when the ranks that got these orders have ended."""
        self._ordered = []
