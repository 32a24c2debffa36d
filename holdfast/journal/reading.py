"""Many records of a run, read at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

READERS = 8

T = TypeVar("T")


def read_all(read: Callable[..., T], *numbers: Iterable[int]) -> list[T]:
    """Call `read` for many records in parallel: a store may be far away, and a command or an attempt waits for this."""
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(read, *numbers))
