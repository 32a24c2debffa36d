"""A checkpoint on its way to the store.

The state is copied, and training may go on; all the rest is done beside it. Each part of the copy is hashed by one
thread and written by another, several parts at once, so that a save takes as long as the slower of the two, and nothing
is read back to be hashed.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from holdfast.checkpoint.files import hash_bytes
from holdfast.checkpoint.format import Part, Payload, copy_pieces, cut
from holdfast.checkpoint.metadata import Saved
from holdfast.checkpoint.writing import File, Written, write_checkpoint
from holdfast.config import PART_BYTES
from holdfast.memory import Buffers, Priority
from holdfast.store import Bytes, Store

# How many parts are written at once: a disk has a queue, and an object store has connections to spare.
WRITERS = 4
# More threads copy no faster than memory lets them.
COPIERS = 4
# Pieces of this mean size and less are copied faster by one thread than by several, which wait for the interpreter.
ONE_THREAD_BYTES = 2**20


class Saver:
    """Saves checkpoints, one at a time, beside whatever else the process does.

    A part that was the same in the last two checkpoints, and still is (a frozen layer's), is not written but copied by
    the store, ``shared_by`` permitting. Each checkpoint is complete by itself all the same.

    Args:
        part_bytes: see `cut`.
        shared_by: in how many checkpoints one after the other a file may be the same one, which a disk has only once;
            damage to it is damage to them all.
        pin: see `Buffers.take`.
    """

    def __init__(
        self, part_bytes: int = PART_BYTES, shared_by: int = 1, pin: Callable[[memoryview], None] | None = None
    ) -> None:
        self.part_bytes = part_bytes
        self.shared_by = shared_by
        self.pin = pin
        self.buffers = Buffers()
        # Kept: to begin them at each save takes 0.2 ms, and training stands still.
        self._copiers = ThreadPoolExecutor(min(count_cores(), COPIERS), "copy")
        self._last_run = ""
        self._last: dict[str, Written] = {}
        self._under_way: Future[Saved] | None = None
        self._priority = Priority()

    def begin(
        self,
        run: Store,
        payload: Payload,
        metadata: dict[str, Any],
        metrics: str,
        then: Callable[[Saved], object] = lambda saved: None,
        *,
        is_urgent: bool = True,
    ) -> None:
        """The state is copied: what it is in may change. One that is still on its way is waited for, first.

        In the end a complete checkpoint is on the store, durable, and its hashes are known without reading it back.
        The first part comes first, and ``metadata.json`` last: a folder that has it is complete. Nothing that exists
        is overwritten: what a dead attempt left in the folder is used if it is the same to the byte; otherwise
        (another writer's checkpoint, or a damaged one) the next free name is taken.

        Args:
            run: the run's folder.
            metadata: all fields of `Metadata` but those about the payload's bytes.
            metrics: one line of JSON a step.
            then: called with what was saved, in another thread.
            is_urgent: otherwise its threads have only what others leave of the processors.
        """
        self.wait()
        began = time.monotonic()
        parts = cut(payload, self.part_bytes)
        images = {part.name: self.buffers.take(number, part.size_bytes, self.pin) for number, part in enumerate(parts)}
        # Before the rest begins: each time that another thread has the interpreter, training would stand still longer.
        self._copy_out(parts, images)
        del parts, payload  # thousands of objects, perhaps: before another thread wants the interpreter
        # One for all of them: were only those low that hash, the others would begin at once, and training would wait
        # for an interpreter that a low one is to have: 0.3 s instead of 0.04 where other processes want the cores.
        self._priority = Priority()
        prepare = None if is_urgent else self._priority.lower
        last = self._last if self._last_run == run.url else {}

        def write() -> Saved:
            with ThreadPoolExecutor(count_cores(), "hash", prepare) as hashing:
                files = [
                    File(name, image, hashing.submit(hash_bytes, name, image), last.get(name), self.shared_by)
                    for name, image in images.items()
                ]
                with ThreadPoolExecutor(WRITERS, "write", prepare) as writing:
                    saved = write_checkpoint(run, files, metadata | {"part_bytes": self.part_bytes}, metrics, writing)
            self._last_run, self._last = run.url, {file.name: file.written(saved.path) for file in files}
            saved = saved.model_copy(update={"save_s": time.monotonic() - began})
            then(saved)
            return saved

        thread = ThreadPoolExecutor(1, "save", prepare)
        self._under_way = thread.submit(write)
        thread.shutdown(wait=False)

    def _copy_out(self, parts: Sequence[Part], images: Mapping[str, memoryview]) -> None:
        """Each part's image has its bytes."""
        copying = []
        for part in parts:
            is_coarse = part.size_bytes > ONE_THREAD_BYTES * len(part.pieces)
            if is_coarse and all(isinstance(piece, Bytes) or piece.address for piece in part.pieces):
                copying.append(self._copiers.submit(copy_pieces, part.pieces, images[part.name]))
            else:
                # What a device has, by the thread that has given it its work: only so it is copied after that is done.
                copy_pieces(part.pieces, images[part.name])
        for each in copying:
            each.result()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> Saved | None:
        """What was last begun, complete and durable; None if nothing was.

        Raises:
            StoreError: it couldn't be written.
        """
        if self._under_way is None:
            return None
        if self.is_busy:
            self._priority.restore()  # nobody trains meanwhile
        return self._under_way.result()

    def check(self) -> None:
        """Raise what the last save has failed with, if it has."""
        if not self.is_busy:
            self.wait()


def save(run: Store, payload: Payload, metadata: dict[str, Any], metrics: str, part_bytes: int = PART_BYTES) -> Saved:
    """As `Saver.begin`, and wait for it."""
    saver = Saver(part_bytes)
    saver.begin(run, payload, metadata, metrics)
    saved = saver.wait()
    assert saved is not None
    return saved


def count_cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
