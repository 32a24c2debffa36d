"""Memory for a checkpoint, mapped once and reused by every later save.

Measured gain: with ``HOLDFAST_WITHOUT=buffers`` a save stalls training three times as long, because the system
clears each new page: 0.12 s instead of 0.04 s for 100 MB on two busy cores. Without huge pages, each request of direct
I/O has to look up 512 times as many pages: see *saving* in docs/performance.md.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.memory.switches import is_on

HUGE_PAGE_BYTES = 2**21  # the size of a huge page on Linux
GROWTH = 8  # a piece that was too small is replaced by one with an eighth more than the needed size


# Pins memory for fast copies from a device. Returns a function that unpins the memory; None if it can't be pinned.
Unpin = Callable[[], object] | None
Pin = Callable[[memoryview], Unpin]


class Buffers:
    """Reusable, page-aligned memory: one piece for each numbered part of a checkpoint.

    A forked process, such as a loader's worker, doesn't get the pieces that `take` returns. Otherwise the system would
    copy each pinned page at the fork, and each other page at the next save.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._pinned: dict[int, Unpin] = {}  # the parts whose memory `pin` has pinned, or has failed to pin
        finalize = weakref.finalize(self, _unpin_all, self._maps, self._pinned)
        finalize.atexit = False

    def take(self, part: int, size_bytes: int) -> memoryview:
        """Return memory for a part. The next call for the same part returns the same memory, even if it is in use.

        Raises:
            MemoryError: the machine has too little memory.
        """
        found = self._map(part, size_bytes)
        _set_forks(found, are_copied=False)
        return memoryview(found)[:size_bytes]

    def pin(self, parts: Iterable[int], pin: Pin) -> None:
        """Pin the memory of some parts, each piece once. If a larger piece has replaced a pinned one, unpin that one.

        Pinning takes long (`memory.pinning`), so call this when training doesn't wait. The memory may be in use.
        """
        for part in parts if is_on("buffers") else ():
            if part not in self._pinned:
                self._pinned[part] = pin(memoryview(self._maps[part]))

    def lend(self, part: int, size_bytes: int) -> memoryview:
        """Return memory for a part. The next call returns the same memory, unless a reference to it still exists.

        A slice counts as a reference, too.

        Raises:
            MemoryError: the machine has too little memory.
        """
        # A slice of a memoryview keeps the underlying object alive, but not the memoryview. So watch the underlying
        # object.
        found = self._map(part, size_bytes)
        _set_forks(found, are_copied=True)  # a forked process may read a tensor in this memory
        lent = (ctypes.c_char * max(size_bytes, 1)).from_buffer(found)
        self._lent[part] = weakref.ref(lent)
        return memoryview(lent).cast("B")[:size_bytes]

    def _map(self, part: int, size_bytes: int) -> mmap.mmap:
        found = self._maps.get(part)
        if found is None or len(found) < size_bytes or self._is_lent(part) or not is_on("buffers"):
            _unpin(self._pinned, part)  # before the piece is unmapped
            # A state that grows at each save, such as a replay buffer, would need new memory at each save.
            spare_bytes = size_bytes // GROWTH if found is not None and len(found) < size_bytes else 0
            self._maps[part] = found = map_memory(size_bytes + spare_bytes)
        return found

    def _is_lent(self, part: int) -> bool:
        lent = self._lent.pop(part, None)
        return lent is not None and lent() is not None


def map_memory(size_bytes: int) -> mmap.mmap:
    """Map new, page-aligned memory. The memory is unmapped when the last reference to it is deleted.

    Raises:
        MemoryError: the machine has too little memory.
    """
    try:
        mapped = mmap.mmap(
            -1, -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:  # ENOMEM: too little memory
        raise MemoryError(f"{size_bytes:,} bytes: {error.strerror}") from None
    if size_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE") and is_on("huge pages"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _unpin(pinned: dict[int, Unpin], part: int) -> None:
    unpin = pinned.pop(part, None)
    if unpin is not None:
        unpin()


def _unpin_all(maps: dict[int, mmap.mmap], pinned: dict[int, Unpin]) -> None:
    """Unpin all memory of a `Buffers`. ``maps`` keeps the memory mapped until then."""
    for part in [*pinned]:
        _unpin(pinned, part)
    maps.clear()


def _set_forks(memory: mmap.mmap, *, are_copied: bool) -> None:
    """Choose whether a process that is forked from this one gets a copy of the memory. It has an effect only on Linux.

    Without a copy, the forked process must not read the memory.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DOFORK if are_copied else mmap.MADV_DONTFORK)
