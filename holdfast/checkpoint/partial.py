"""Reading a checkpoint part by part, for ranks that each need only some rows of its tensors."""

import collections
import hashlib
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from holdfast.checkpoint.files import FileDamage, damage_error
from holdfast.checkpoint.near import NearReader
from holdfast.checkpoint.streaming import MemoryWindows
from holdfast.checkpoint.verifying import verify_file
from holdfast.errors import NameMissing
from holdfast.journal import Commit, FileRecord
from holdfast.store import Store


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
