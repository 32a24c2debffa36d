"""What the disk does at best, past the system's cache.

Needs the standard library only: the peers' environment has little more.
"""

import mmap
import os
from pathlib import Path

PIECE_BYTES = 16 * 2**20


def take_memory(size_bytes: int) -> memoryview:
    """Memory for so many bytes, at least, in whole pieces, aligned as `O_DIRECT` wants it."""
    return memoryview(mmap.mmap(-1, -(-size_bytes // PIECE_BYTES) * PIECE_BYTES))


def write_raw(path: Path, memory: memoryview) -> None:
    """Write the memory to a file, durably."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        for start in range(0, len(memory), PIECE_BYTES):
            os.write(file, memory[start : start + PIECE_BYTES])
        os.fsync(file)
    finally:
        os.close(file)


def read_raw(path: Path, memory: memoryview) -> None:
    """Read the file into the memory."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for start in range(0, len(memory), PIECE_BYTES):
            os.preadv(file, [memory[start : start + PIECE_BYTES]], start)
    finally:
        os.close(file)


def make_cold(folder: Path) -> None:
    """What the files of a folder hold is on the disk only, no more in the system's cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
