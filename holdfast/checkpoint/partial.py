"""Reading a checkpoint part by part, for ranks that each need some rows of it."""

import hashlib
import json
import math
import queue
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.checkpoint.files import FileDamage, damage_error
from holdfast.checkpoint.format import HEADER_METADATA, ITEM_BYTES, MAX_HEADER_BYTES, METADATA_KEY
from holdfast.checkpoint.streaming import Windows
from holdfast.checkpoint.verifying import check_others
from holdfast.errors import CheckpointDamaged, NameMissing
from holdfast.journal import Commit, FileRecord
from holdfast.store import Store


class Rows(NamedTuple):
    """Consecutive rows of a tensor in a part, or all of its rows.

    Attributes:
        position: the first byte in the part.
        shape: the shape of these rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    position: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    """The header of a part: its rows, and the state's values that are no tensors, if it is the first part."""

    rows: tuple[Rows, ...]
    tree: Any


def read_headers(folder: Store, commit: Commit, parts: Iterable[FileRecord]) -> dict[str, Header]:
    """Read the headers of some of a commit's parts, by the part's name. Nothing is verified yet but sizes.

    Raises:
        CheckpointDamaged: a part is missing, has another size, or isn't well-formed.
    """
    parts = list(parts)
    check_others(folder, commit, parts)
    return {part.name: _read_header(folder, commit, part) for part in parts}


def _read_header(folder: Store, commit: Commit, part: FileRecord) -> Header:
    path = f"{commit.path}/{part.name}"
    try:
        (header_bytes,) = struct.unpack("<Q", folder.read(path, 0, 8))
        begin = 8 + min(header_bytes, MAX_HEADER_BYTES)
        header = json.loads(folder.read(path, 8, begin))
        metadata = header.pop(HEADER_METADATA, None)
        rows = tuple(_read_rows(name, entry, begin, part.size_bytes) for name, entry in header.items())
        return Header(rows, json.loads(metadata[METADATA_KEY]) if metadata else None)
    except NameMissing:  # deleted since its size was read
        raise CheckpointDamaged(f"{path} is missing") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not a safetensors file of this format: {error}") from None


def _read_rows(name: str, entry: dict[str, Any], begin: int, file_bytes: int) -> Rows:
    start, end = entry["data_offsets"]
    rows = Rows(name, entry["dtype"], tuple(map(int, entry["shape"])), begin + start)
    if not 0 <= start <= end <= file_bytes - begin or end - start != rows.size_bytes:
        raise ValueError(f"{name} lies outside the file")
    return rows


class PartsReader:
    """A thread that reads some parts ahead, one after the other, in windows of memory, and verifies them.

    An error doesn't end it: the windows of a damaged part come all the same, with any bytes, and `check` raises.

    Args:
        windows: memory for the windows; see `count_window_bytes`.
    """

    def __init__(
        self, folder: Store, commit: Commit, parts: Iterable[FileRecord], windows: memoryview, window_bytes: int
    ) -> None:
        self._folder, self._commit, self._window_bytes = folder, commit, window_bytes
        self._windows = Windows(windows, window_bytes)
        self._filled = queue.SimpleQueue[tuple[memoryview, int]]()
        self._taken = memoryview(b"")
        self._results = queue.SimpleQueue[Exception | None]()
        self._is_closed = False
        self._thread = threading.Thread(target=self._read, args=(list(parts),), name="read", daemon=True)
        self._thread.start()

    def take(self) -> memoryview:
        """Return the next bytes of the present part: a window, or the rest of the part."""
        self._taken, size_bytes = self._filled.get()
        return self._taken[:size_bytes]

    def give_back(self) -> None:
        """Let the memory that `take` returned last be used again."""
        self._windows.give_back(self._taken)

    def check(self) -> None:
        """Verify the present part, all windows of which were taken, and go on to the next one.

        Raises:
            CheckpointDamaged: it is missing, or has another hash than in the commit.
            StoreError: it can't be read.
        """
        problem = self._results.get()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._is_closed = True
        self._windows.give_back(memoryview(b""))
        self._thread.join()

    def _read(self, parts: list[FileRecord]) -> None:
        for part in parts:
            digest = hashlib.sha256()
            problem: Exception | None = None
            for start in range(0, part.size_bytes, self._window_bytes):
                window = self._windows.take()
                if self._is_closed:
                    return
                piece = window[: part.size_bytes - start]
                try:
                    if problem is None:
                        for _ in self._folder.fill(f"{self._commit.path}/{part.name}", piece, start):
                            pass
                        digest.update(piece)
                except NameMissing:  # deleted since its size was read
                    problem = damage_error(self._commit, [FileDamage.missing(self._commit.path, part)])
                except Exception as error:
                    problem = error
                self._filled.put((window, len(piece)))
            found = digest.hexdigest()
            if problem is None and found != part.sha256:
                damage = FileDamage(self._commit.path, part.name, part.sha256, found)
                problem = damage_error(self._commit, [damage])
            self._results.put(problem)
