"""Memory for a checkpoint on its way, taken once and used again: fresh pages cost three times what a copy costs."""

import mmap
from collections.abc import Callable

ALIGNED_BYTES = 2**21  # a huge page, where the system has them; what unbuffered writes need is less


class Buffers:
    """One piece of memory for each part of a checkpoint, page-aligned."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._pinned: list[mmap.mmap] = []

    def take(self, part: int, size_bytes: int, pin: Callable[[memoryview], None] | None = None) -> memoryview:
        """So much memory for a part; what it had before is overwritten.

        Args:
            pin: makes memory fit for copies from a device; called once for each piece. It stays mapped until the
                process ends.

        Raises:
            MemoryError: there is not so much.
        """
        found = self._maps.get(part)
        if found is None or len(found) < size_bytes:
            self._maps[part] = found = map_memory(size_bytes)
        if pin is not None and all(found is not each for each in self._pinned):
            self._pinned.append(found)
            pin(memoryview(found))
        return memoryview(found)[:size_bytes]


def map_memory(size_bytes: int) -> mmap.mmap:
    """New memory, page-aligned, that is given back when nobody refers to it any more.

    Raises:
        MemoryError: there is not so much.
    """
    try:
        mapped = mmap.mmap(
            -1, -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:  # ENOMEM
        raise MemoryError(f"{size_bytes:,} bytes: {error.strerror}") from None
    if size_bytes >= ALIGNED_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
