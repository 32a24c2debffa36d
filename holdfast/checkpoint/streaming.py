"""Parts that pass through small windows of memory: one thread fills a window while others hash and write earlier ones.

Ranks that each hold a shard of a state collect a part's bytes from each other, so no rank has the whole part in memory.
For a save, a rank needs memory for a copy of its shard and for `WINDOWS` windows.
"""

import hashlib
import queue
from collections.abc import Iterator

from holdfast.journal import FileRecord

# Each rank has this number of parts in progress at once: one is hashed while another is written.
ABREAST = 2
# The number of windows for each part in progress. Reads use more windows, because an object store answers slowly.
DEPTH, READ_DEPTH = 2, 4
WINDOWS, READ_WINDOWS = ABREAST * DEPTH, ABREAST * READ_DEPTH
# All windows together are an eighth of a rank's shard. Direct I/O needs LEAST_WINDOW_BYTES at least. Each window wakes
# several threads: with windows of 1 MiB a save takes a quarter more processor time than with windows of 2 MiB.
LEAST_WINDOW_BYTES = 2**20
MOST_WINDOW_BYTES = 2**22
SHARD_TO_WINDOWS = 8


def count_window_bytes(shard_bytes: int, windows: int) -> int:
    """Return the size of a window in bytes, a power of 2.

    Args:
        shard_bytes: the size of a rank's shard of the state.
        windows: the number of windows that a rank has at the same time.
    """
    chosen = 1 << max(0, (shard_bytes // SHARD_TO_WINDOWS // windows).bit_length() - 1)
    return min(MOST_WINDOW_BYTES, max(LEAST_WINDOW_BYTES, chosen))


class MemoryWindows:
    """Windows of memory, each of which is free or in use.

    Args:
        memory: the memory that is cut into windows.
    """

    def __init__(self, memory: memoryview, window_bytes: int) -> None:
        self._free = queue.SimpleQueue[memoryview]()
        for start in range(0, len(memory), window_bytes):
            self._free.put(memory[start : start + window_bytes])

    def take(self) -> memoryview:
        """Return a free window. If all are in use, wait until one is free."""
        return self._free.get()

    def give_back(self, window: memoryview) -> None:
        """Free a window."""
        self._free.put(window)


class Stream:
    """The bytes of one part, in windows. One thread fills them in order; another takes them in this order."""

    def __init__(self, name: str, size_bytes: int, windows: MemoryWindows) -> None:
        self._name, self._size_bytes, self._windows = name, size_bytes, windows
        self._filled = queue.SimpleQueue[tuple[memoryview, int] | BaseException]()
        self._taken: memoryview | None = None
        self._digest = hashlib.sha256()
        self._error: BaseException | None = None
        self._pieces = self._hash_pieces()

    # ---- for the thread that fills windows

    def take(self, size_bytes: int) -> memoryview:
        """Wait until a window is free, and return memory for the next bytes, at most a window."""
        self._taken = self._windows.take()
        return self._taken[:size_bytes]

    def put(self, filled: memoryview) -> None:
        """Pass the memory that `take` returned, now with the part's next bytes, to the other thread."""
        assert self._taken is not None
        self._filled.put((self._taken, len(filled)))

    def fail(self, error: BaseException) -> None:
        """Make the thread that takes the bytes raise this error instead of waiting for the missing bytes."""
        self._filled.put(error)

    # ---- for the thread that takes windows

    @property
    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes that have not been taken yet, in pieces.

        Each piece is hashed. Its memory is freed when the next piece is taken.
        """
        return self._pieces

    def finish(self) -> FileRecord:
        """Hash the bytes that were not taken yet, and return the part's record.

        Raises:
            BaseException: the error that was passed to `fail`.
        """
        for _ in self._pieces:
            pass
        if self._error is not None:
            raise self._error
        return FileRecord(name=self._name, size_bytes=self._size_bytes, sha256=self._digest.hexdigest())

    def _hash_pieces(self) -> Iterator[memoryview]:
        done = 0
        while done < self._size_bytes:
            found = self._filled.get()
            if isinstance(found, BaseException):
                self._error = found
                raise found
            window, size_bytes = found
            piece = window[:size_bytes]
            self._digest.update(piece)
            yield piece
            done += size_bytes
            self._windows.give_back(window)
