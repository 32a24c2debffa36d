"""The parallel reading of many records of a run, or of many runs of a store."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

READERS = 16  # the number of threads; an object store takes some 30 ms for each record

T = TypeVar("T")


def read_all(read: Callable[..., T], *many: Iterable[Any]) -> list[T]:
    """Return the results of `read` for many records or runs, read in parallel because a store may answer slowly."""
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(read, *many))
