"""Many records of a run, or runs of a store, read at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

READERS = 16  # an object store takes some 30 ms for each

T = TypeVar("T")


def read_all(read: Callable[..., T], *many: Iterable[Any]) -> list[T]:
    """Call `read` for many records or runs in parallel: a store may be far away, and a command or attempt waits."""
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(read, *many))
