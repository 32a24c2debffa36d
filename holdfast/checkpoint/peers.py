"""The ranks that write one checkpoint together: each part has one owner, which hashes and writes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from holdfast.checkpoint.format import Part
from holdfast.checkpoint.parts import File, Writing
from holdfast.memory import Buffers
from holdfast.store import Store

T = TypeVar("T")


class Held(Protocol):
    """The exchange of a checkpoint's bytes between the ranks that hold them and the ranks that write them."""

    def collect(
        self,
        place: Store,
        files: Sequence[File],
        lines: Mapping[str, bytes],
        pool: ThreadPoolExecutor,
        copies: Mapping[str, memoryview],
        buffers: Buffers,
    ) -> Writing:
        """Return the files that this rank writes to a place, while the ranks exchange the files' bytes.

        Args:
            files: the parts that this rank owns.
            lines: the files of JSON lines beside the state, by name; the main rank writes them.
            pool: the threads that hash and write.
            copies: the copy of this rank's bytes of each part, by the part's name.
            buffers: memory for the exchange, besides the copies.
        """


class Peers(Protocol):
    """The ranks that write one checkpoint together. All ranks make the same calls in the same order.

    Attributes:
        rank: this rank; 0 is the main rank.
        ranks: the number of ranks.
    """

    rank: int
    ranks: int

    def hold(self, parts: Sequence[Part], owners: Mapping[str, int]) -> tuple[list[Part], Held]:
        """Return this rank's bytes of each part, and the exchange that later sends copies of the bytes to the owners.

        The caller copies the bytes before the state changes.

        Args:
            owners: the rank that owns each part, by the part's name.

        Raises:
            StateError: the ranks have tensors of different names or shapes; all ranks raise it.
        """

    def decide(self, work: Callable[[], T]) -> T:
        """Call ``work`` in the main rank. Return its result in all ranks, or raise its error in all ranks."""

    def each(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` in each rank. Return the results by rank, or raise the first error in all ranks."""


class Alone:
    """A rank that writes a checkpoint by itself: the only rank, or the main rank if all ranks have the same state."""

    rank, ranks = 0, 1

    def decide(self, work: Callable[[], T]) -> T:
        """Return the result of the work."""
        return work()

    def each(self, work: Callable[[], T]) -> list[T]:
        """Return a list with the result of the work."""
        return [work()]


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each part, so that all ranks own about equally many bytes.

    The main rank owns the first part.

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


def list_batches(owners: Mapping[str, int], abreast: int) -> Iterator[list[str]]:
    """Yield the names of parts, in their order, in batches. A batch has at most ``abreast`` parts of each owner.

    Args:
        owners: the rank that owns each part, by the part's name.
    """
    own: dict[int, list[str]] = {}
    for name, owner in owners.items():
        own.setdefault(owner, []).append(name)
    for start in range(0, max(map(len, own.values()), default=0), abreast):
        yield [name for names in own.values() for name in names[start : start + abreast]]
