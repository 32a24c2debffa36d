"""Saving checkpoints in the background while training continues.

A save first copies the state; then training may continue. Threads hash and write the copy: one thread hashes a part
while another writes it, and several parts are in progress at once. So a save takes as long as hashing or writing,
whichever is slower, and nothing is read back to be hashed. If each rank holds a shard of the state, the ranks copy
their shards, and exchange the copies while they hash and write; see `collecting`.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from holdfast.checkpoint.collecting import Collected
from holdfast.checkpoint.files import hash_bytes
from holdfast.checkpoint.format import Part, cut
from holdfast.checkpoint.metadata import METRICS, SHOWN, Saved
from holdfast.checkpoint.near import Near
from holdfast.checkpoint.payload import Payload, copy_pieces
from holdfast.checkpoint.peers import Alone, Peers, assign_owners
from holdfast.checkpoint.streaming import WINDOWS
from holdfast.checkpoint.writing import WRITERS, File, Images, Writing, Written, write_checkpoint
from holdfast.config import PART_BYTES
from holdfast.errors import StoreError
from holdfast.journal import FileRecord
from holdfast.memory import Buffers, Pin, Priority
from holdfast.store import Bytes, Store

# The number of threads that copy the state. More threads copy no faster, because memory bandwidth is the limit.
COPIERS = 4
# The key of the windows' buffer in `Buffers`; the parts' buffers have keys from 0.
WINDOWS_NUMBER = -1
# If the pieces' mean size is at most this, one thread copies them faster than several threads, which would wait for the
# GIL.
ONE_THREAD_BYTES = 2**20


class Saver:
    """A saver of checkpoints: one save at a time, in background threads.

    If a part has not changed in the last two checkpoints (a frozen layer, for example), the store copies or links it
    from the last checkpoint, as far as ``shared_by`` allows. Still each checkpoint is complete by itself.

    Args:
        part_bytes: see `cut`.
        shared_by: the largest number of consecutive checkpoints that share one file. A disk holds such a file once, so
            damage to it damages all of them.
        pin: pins the memory of parts that are copied from a device; see `Buffers.pin`. None if no memory is pinned.
        near: the near folder, to which each checkpoint is written before it is written to the store; None for no near
            folder.
    """

    def __init__(
        self,
        part_bytes: int = PART_BYTES,
        shared_by: int = 1,
        pin: Pin | None = None,
        near: Near | None = None,
    ) -> None:
        self.part_bytes = part_bytes
        self.shared_by = shared_by
        self.pin = pin
        self.near = near
        self.buffers = Buffers()
        # The threads stay alive between saves, because training would wait 0.2 ms for their start.
        self._copiers = ThreadPoolExecutor(min(count_cores(), COPIERS), "copy")
        # the parts of the last checkpoint in each folder, by the folder's URL and the part's name
        self._last: dict[str, dict[str, Written]] = {}
        self._under_way: Future[Saved | None] | None = None
        self._priority = Priority()

    def begin(
        self,
        folder: Store,
        payload: Payload,
        metadata: dict[str, Any],
        metrics: str,
        then: Callable[[Saved], object] = lambda saved: None,
        *,
        shown: bytes = b"",
        note_failure: Callable[[StoreError], object] | None = None,
        is_urgent: bool = True,
        peers: Peers | None = None,
    ) -> None:
        """Copy the state and start to save it; first wait for a save in progress. The state may change after the call.

        The save ends with a complete, durable checkpoint, whose hashes are known without reading it back. The save
        writes the first part first and ``metadata.json`` last, so a folder with ``metadata.json`` is complete. It
        overwrites nothing. If a dead attempt has left files in the folder, the save uses the files with equal bytes.
        If a file's bytes differ, as in another writer's or a damaged checkpoint, the save takes the next free folder
        name.

        Args:
            folder: the run's folder on the store.
            metadata: the fields of `Metadata`, except the fields about the payload's bytes.
            metrics: the trail, one line of JSON for each step.
            then: called with the saved checkpoint, in another thread.
            shown: the content of ``shown.jsonl``; empty for no file.
            note_failure: called, in another thread, if the checkpoint can't be written, for a save that the run can do
                without. If None, `wait` raises the error.
            is_urgent: False gives the save's threads the lowest priority, so that training goes first.
            peers: the ranks that each hold a shard of the state and write the checkpoint together; None if this rank
                writes it alone.

        Raises:
            StoreError: the save in progress failed.
        """
        self.wait()
        began = time.monotonic()
        parts = cut(payload, self.part_bytes)
        sizes = {part.name: part.size_bytes for part in parts}
        writers = peers or Alone()
        owners = dict(zip(sizes, assign_owners([*sizes.values()], writers.ranks), strict=True))
        copied, held = peers.hold(parts, owners) if peers else (parts, None)
        copies = {part.name: self.buffers.take(number, part.size_bytes) for number, part in enumerate(copied)}
        on_devices = [number for number, part in enumerate(copied) if _has_device_pieces(part)]
        # Training waits for this copy. So the save's threads, which could hold the GIL, start only after the copy.
        self._copy_out(copied, copies)
        del parts, payload, copied  # delete now: to free thousands of objects later would hold the GIL
        # All save threads share one priority. If only the hashing threads were low, a writer could wait for the GIL
        # behind one of them and stall training: 0.3 s instead of 0.04 s on busy cores.
        self._priority = Priority()
        prepare = None if is_urgent else self._priority.lower
        lines = {METRICS: metrics.encode()} | ({SHOWN: shown} if shown else {})
        described = metadata | {"part_bytes": self.part_bytes}
        last = self._last.get(folder.url, {})

        def write() -> Saved:
            own = [name for name, owner in owners.items() if owner == writers.rank]
            with (
                ThreadPoolExecutor(count_cores(), "hash", prepare) as hashing,
                ThreadPoolExecutor(WRITERS, "write", prepare) as writing,
            ):
                records: dict[str, Future[FileRecord]] = {
                    name: Future() if held else hashing.submit(hash_bytes, name, copies[name]) for name in own
                }
                files = [File(name, records[name], last.get(name), self.shared_by) for name in own]

                def write_to(place: Store, files: Sequence[File]) -> Saved:
                    content: Writing
                    if peers and held:
                        windows = self.buffers.take(WINDOWS_NUMBER, WINDOWS * held.window_bytes)
                        content = Collected(place, files, lines, writing, peers, held, copies, windows)
                    else:
                        content = Images(place, files, copies, lines, writing)
                    return write_checkpoint(place, content, [*sizes], described, writers)

                if self.near is not None and self.near.is_of(folder):
                    unlinked = [File(name, records[name], None, 1) for name in own]
                    write_near = functools.partial(write_to, files=unlinked)
                    self.near.keep(sum(sizes.values()), write_near, writers)
                saved = write_to(folder, files)
            problem = self.near.take_problem() if self.near else ""
            self._last[folder.url] = {file.name: file.written(saved.path) for file in files}
            saved = saved.model_copy(update={"save_s": time.monotonic() - began, "near_problem": problem})
            then(saved)
            return saved

        def write_or_note() -> Saved | None:
            try:
                return write()
            except StoreError as error:
                if note_failure is None:
                    raise
                note_failure(error)
                return None
            finally:
                # Pin for the next save. An urgent save is the last one, and the process waits for its end.
                if self.pin is not None and not is_urgent:
                    self.buffers.pin(on_devices, self.pin)

        thread = ThreadPoolExecutor(1, "save", prepare)
        self._under_way = thread.submit(write_or_note)
        thread.shutdown(wait=False)

    def _copy_out(self, parts: Sequence[Part], images: Mapping[str, memoryview]) -> None:
        """Copy each part's pieces into the part's image, one contiguous buffer."""
        copying = []
        for part in parts:
            is_coarse = part.size_bytes > ONE_THREAD_BYTES * len(part.pieces)
            if is_coarse and all(isinstance(piece, Bytes) or piece.address for piece in part.pieces):
                copying.append(self._copiers.submit(copy_pieces, part.pieces, images[part.name]))
            else:
                # Copy in this thread: a GPU waits for the step's kernels only if the same thread queues the copy.
                copy_pieces(part.pieces, images[part.name])
        for each in copying:
            each.result()

    @property
    def is_busy(self) -> bool:
        """Return whether a save is in progress."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> Saved | None:
        """Wait for the last save and return its checkpoint, complete and durable; None if no save was started.

        Raises:
            StoreError: the checkpoint couldn't be written.
        """
        if self._under_way is None:
            return None
        if self.is_busy:
            self._priority.restore()  # the caller waits, so training doesn't need the cores now
        return self._under_way.result()

    def on_failure(self, call: Callable[[], object]) -> None:
        """Call a function if the last save fails: in another thread, or at once if the save has already failed."""
        if self._under_way is not None:
            self._under_way.add_done_callback(lambda save: call() if save.exception() else None)

    def check(self) -> None:
        """Raise the last save's error if the save has failed. Don't wait for a save in progress."""
        if not self.is_busy:
            self.wait()


def save(
    folder: Store,
    payload: Payload,
    metadata: dict[str, Any],
    metrics: str,
    part_bytes: int = PART_BYTES,
    shown: bytes = b"",
) -> Saved:
    """Save a checkpoint, and return it when it is durable; see `Saver.begin`."""
    saver = Saver(part_bytes)
    saver.begin(folder, payload, metadata, metrics, shown=shown)
    saved = saver.wait()
    assert saved is not None
    return saved


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _has_device_pieces(part: Part) -> bool:
    return not all(isinstance(piece, Bytes) or piece.is_on_host for piece in part.pieces)
