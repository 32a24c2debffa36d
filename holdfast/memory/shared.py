"""Memory of one process that other processes of its machine map, so that they read the same bytes once."""

import mmap
import os
from pathlib import Path


class SharedBuffers:
    """Memory for a checkpoint's numbered parts, as files in memory. `close` closes them; memory that is mapped stays.

    Attributes:
        files: the path and the size of each part's file, in the order of the calls of `lend`. A process of the same
            user can open a file while this process lives and hasn't closed the file.
    """

    def __init__(self, free_bytes: int) -> None:
        """
        Args:
            free_bytes: the memory that this machine has free; 0 if that is unknown. The kernel promises no memory to
                such files, and would kill a process that writes more than the machine has.
        """
        self._free_bytes = free_bytes
        self.files: list[tuple[str, int]] = []
        self._descriptors: list[int] = []

    def lend(self, part: int, size_bytes: int) -> memoryview:
        """Return new memory for a part. Its last reference frees it, once other processes have unmapped it, too.

        Raises:
            MemoryError: the machine has too little memory.
        """
        if 0 < self._free_bytes < size_bytes + sum(lent for _, lent in self.files):
            raise MemoryError(f"{size_bytes:,} bytes: more than this machine has free")
        descriptor = os.memfd_create(f"holdfast-part-{part}")
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, max(size_bytes, 1))
        self.files.append((f"/proc/{os.getpid()}/fd/{descriptor}", size_bytes))
        return memoryview(mmap.mmap(descriptor, max(size_bytes, 1)))[:size_bytes]

    def close(self) -> None:
        """Close the files, which no other process can open any more."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def map_shared(path: str, size_bytes: int) -> memoryview:
    """Return the memory of a different process; see `SharedBuffers`. A page that this process writes becomes its own.

    Raises:
        OSError: the file isn't there, or this process may not open it.
    """
    with Path(path).open("rb") as file:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return memoryview(mmap.mmap(file.fileno(), max(size_bytes, 1), mmap.MAP_PRIVATE, access))[:size_bytes]
