"""Reading a checkpoint part by part, for ranks that each need only some rows of its tensors."""

import collections
import hashlib
import json
import queue
import struct
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.checkpoint.files import FileDamage, damage_error
from holdfast.checkpoint.format import HEADER_METADATA, MAX_HEADER_BYTES, METADATA_KEY, size_of
from holdfast.checkpoint.near import NearReader
from holdfast.checkpoint.progress import ENDED_EPOCH
from holdfast.checkpoint.streaming import MemoryWindows
from holdfast.checkpoint.verifying import check_others, find_parts, verify_file
from holdfast.errors import CheckpointDamaged, NameMissing
from holdfast.journal import Commit, FileRecord
from holdfast.store import Store


class Rows(NamedTuple):
    """Consecutive rows of a tensor in a part, or all of its rows.

    Attributes:
        position: the offset of the first byte in the part.
        shape: the shape of these rows together.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    position: int

    @property
    def size_bytes(self) -> int:
        return size_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Header:
    """The header of a part: its rows; in the first part also the state's values that aren't tensors."""

    rows: tuple[Rows, ...]
    tree: Any


def read_headers(folder: Store, commit: Commit, parts: Iterable[FileRecord]) -> dict[str, Header]:
    """Return the headers of some of a commit's parts, by the part's name. Verify the parts' sizes, not their hashes.

    Raises:
        CheckpointDamaged: a part is missing, has a different size, or isn't well-formed.
    """
    parts = list(parts)
    check_others(folder, commit, parts)
    return {part.name: _read_header(folder, commit, part) for part in parts}


def read_ended_epoch(folder: Store, commit: Commit) -> bool | None:
    """Return whether a loop's code at an epoch's end had run before the save; None if the state can't be read."""
    try:
        first, *_ = find_parts(commit)
        return bool(read_headers(folder, commit, [first])[first.name].tree["progress"].get(ENDED_EPOCH))
    except (CheckpointDamaged, NameMissing, LookupError, TypeError):
        return None


def _read_header(folder: Store, commit: Commit, part: FileRecord) -> Header:
    path = f"{commit.path}/{part.name}"
    try:
        (header_bytes,) = struct.unpack("<Q", folder.read(path, 0, 8))
        begin = 8 + min(header_bytes, MAX_HEADER_BYTES)
        header = json.loads(folder.read(path, 8, begin))
        metadata = header.pop(HEADER_METADATA, None)
        rows = tuple(_read_rows(name, entry, begin, part.size_bytes) for name, entry in header.items())
        return Header(rows, json.loads(metadata[METADATA_KEY]) if metadata else None)
    except NameMissing:  # the part was deleted after its size was read
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
    """Threads that read some parts ahead, one part after the other, in windows of memory, and verify them.

    All windows except one are read at the same time, because a store may answer slowly.

    An error doesn't end the threads. `take` still returns all windows of a damaged part, perhaps with wrong bytes; then
    `check` raises the error.

    Args:
        windows: memory for two windows or more; see `count_window_bytes`.
        near: the near copies, from which an undamaged part is read. A copy is hashed before `take` returns its first
            window, because the caller can't undo the use of a wrong window.
    """

    def __init__(
        self,
        folder: Store,
        commit: Commit,
        parts: Iterable[FileRecord],
        windows: memoryview,
        window_bytes: int,
        near: NearReader | None = None,
    ) -> None:
        self._folder, self._commit, self._window_bytes, self._near = folder, commit, window_bytes, near
        self._windows = MemoryWindows(windows, window_bytes)
        self._ahead = len(windows) // window_bytes - 1
        self._filled = queue.SimpleQueue[tuple[memoryview, int]]()
        self._taken = memoryview(b"")
        self._results = queue.SimpleQueue[Exception | None]()
        self._is_closed = False
        self._thread = threading.Thread(target=self._read, args=(list(parts),), name="read", daemon=True)
        self._thread.start()

    def take(self) -> memoryview:
        """Return the next bytes of the current part: a window, or the rest of the part."""
        self._taken, size_bytes = self._filled.get()
        return self._taken[:size_bytes]

    def give_back(self) -> None:
        """Release the memory that `take` returned last."""
        self._windows.give_back(self._taken)

    def check(self) -> None:
        """Verify the current part, after all its windows were taken, and advance to the next part.

        Raises:
            CheckpointDamaged: the part is missing, or has a different hash than in the commit.
            StoreError: the part can't be read.
        """
        problem = self._results.get()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """End the threads, and wait for them."""
        self._is_closed = True
        self._windows.give_back(memoryview(b""))
        self._thread.join()

    def _read(self, parts: list[FileRecord]) -> None:
        ahead = collections.deque[_Window]()
        with ThreadPoolExecutor(self._ahead, "read") as readers:
            for part in readers.map(self._place, parts):
                record = part.record
                for start in range(0, record.size_bytes, self._window_bytes):
                    if len(ahead) == self._ahead:
                        self._pass_on(ahead.popleft())
                    memory = self._windows.take()
                    if self._is_closed:
                        return
                    piece = memory[: record.size_bytes - start]
                    reading = readers.submit(self._fill, part, start, piece)
                    ahead.append(_Window(part, memory, piece, start + len(piece) == record.size_bytes, reading))
            for each in ahead:
                self._pass_on(each)

    def _place(self, record: FileRecord) -> "_Part":
        """Return a part with the store and the folder to read it from."""
        near = self._near
        if self._is_closed or near is None or near.store is None:
            return _Part(record, self._folder, self._commit.path)
        if path := near.take(record, verify_file):
            return _Part(record, near.store, path)
        return _Part(record, self._folder, self._commit.path)

    def _fill(self, part: "_Part", start: int, piece: memoryview) -> None:
        if part.problem is not None or self._is_closed:
            return
        try:
            for _ in part.folder.fill(f"{part.path}/{part.record.name}", piece, start):
                pass
        except NameMissing:  # the part was deleted after its size was read
            part.problem = damage_error(self._commit, [FileDamage.missing(self._commit.path, part.record)])
        except Exception as error:
            part.problem = error

    def _pass_on(self, window: "_Window") -> None:
        """Wait until a window is read, hash it, and let `take` return it."""
        window.reading.result()
        part, record = window.part, window.part.record
        part.digest.update(window.piece)
        self._filled.put((window.memory, len(window.piece)))
        if window.is_last:
            found = part.digest.hexdigest()
            if part.problem is None and found != record.sha256:
                damage = FileDamage(self._commit.path, record.name, record.sha256, found)
                part.problem = damage_error(self._commit, [damage])
            self._results.put(part.problem)


class _Part:
    """A part that is being read: its location, its hash so far, and the first error."""

    def __init__(self, record: FileRecord, folder: Store, path: str) -> None:
        self.record, self.folder, self.path, self.digest = record, folder, path, hashlib.sha256()
        self.problem: Exception | None = None


class _Window(NamedTuple):
    """A window that is being filled: its memory, and the slice of this memory that receives the part's bytes."""

    part: _Part
    memory: memoryview
    piece: memoryview
    is_last: bool
    reading: Future[None]
