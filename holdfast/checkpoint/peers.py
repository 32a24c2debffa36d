"""The ranks that write one checkpoint together: each part has one owner, which hashes and writes it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from holdfast.checkpoint.format import Part

T = TypeVar("T")


class Peers(Protocol):
    """The ranks that write one checkpoint together. All ranks call each method alike, in the same order.

    Attributes:
        rank: this rank; 0 is the main rank.
        ranks: the number of ranks.
    """

    rank: int
    ranks: int

    def collect(self, parts: Sequence[Part], owners: Sequence[int], images: Mapping[str, memoryview]) -> None:
        """Fill the images of this rank's parts with the bytes that all ranks hold of them.

        Args:
            owners: the rank that owns each part.
            images: memory for each part that this rank owns, by name.
        """

    def decide(self, work: Callable[[], T]) -> T:
        """Let the main rank work, and return its result in all ranks, or raise its error in all ranks."""

    def each(self, work: Callable[[], T]) -> list[T]:
        """Let each rank work, and return the results by rank, or raise the first error in all ranks."""


class Alone:
    """The only rank, or the main rank of several with the same state, which writes a checkpoint by itself.

    Args:
        copy: copies the parts' bytes to their images.
    """

    rank, ranks = 0, 1

    def __init__(self, copy: Callable[[Sequence[Part], Mapping[str, memoryview]], None]) -> None:
        self._copy = copy

    def collect(self, parts: Sequence[Part], owners: Sequence[int], images: Mapping[str, memoryview]) -> None:
        """Fill the images of all parts."""
        self._copy(parts, images)

    def decide(self, work: Callable[[], T]) -> T:
        """Return the result of the work."""
        return work()

    def each(self, work: Callable[[], T]) -> list[T]:
        """Return a list with the result of the work."""
        return [work()]


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each part: about equal bytes each. The first part is the main rank's.

    Args:
        sizes: the size of each part in bytes.
    """
    owners = [0] * len(sizes)
    loads = [0] * ranks
    largest_first = sorted(range(1, len(sizes)), key=lambda number: -sizes[number])
    for number in [0, *largest_first] if sizes else []:
        owners[number] = loads.index(min(loads)) if number else 0
        loads[owners[number]] += sizes[number]
    return owners
