"""One save: copy a state, then hash the copy and write it to each of its places.

If each rank holds a shard of the state, the ranks copy their shards, and exchange the copies while they hash and write;
see `peers.Held`.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.files import hash_bytes
from holdfast.checkpoint.format import Part, cut
from holdfast.checkpoint.metadata import METRICS, SHOWN, Saved
from holdfast.checkpoint.parts import File, Writing, Written
from holdfast.checkpoint.payload import Payload, copy_pieces
from holdfast.checkpoint.peers import Alone, Held, Peers, assign_owners
from holdfast.checkpoint.writing import WRITERS, Images, write_checkpoint
from holdfast.errors import StoreError
from holdfast.journal import FileRecord
from holdfast.memory import Buffers
from holdfast.store import Bytes, Store

if TYPE_CHECKING:
    from holdfast.checkpoint.near import Near

# If the pieces' mean size is at most this, one thread copies them faster than several threads, which would wait for the
# GIL.
ONE_THREAD_BYTES = 2**20


def _ignore(saved: Saved) -> None: ...


@dataclass
class CheckpointSave:
    """A save of a state as a checkpoint.

    The save ends with a complete, durable checkpoint, whose hashes are known without reading it back. The save writes
    the first part first and ``metadata.json`` last, so a folder with ``metadata.json`` is complete. It overwrites
    nothing. If a dead attempt has left files in the folder, the save uses the files with equal bytes. If a file's bytes
    differ, as in another writer's or a damaged checkpoint, the save takes the next free folder name.

    Attributes:
        folder: the run's folder on the store.
        payload: the state.
        metadata: the fields of `Metadata`, except the fields about the payload's bytes.
        metrics: the trail, one line of JSON for each step.
        then: called with the saved checkpoint, in another thread.
        shown: the content of ``shown.jsonl``; empty for no file.
        note_failure: called, in another thread, if the checkpoint can't be written, for a save that the run can do
            without. If None, `Saver.wait` raises the error.
        is_urgent: False gives the save's threads the lowest priority, so that training goes first.
        peers: the ranks that each hold a shard of the state and write the checkpoint together; None if this rank writes
            it alone.
    """

    folder: Store
    payload: Payload
    metadata: Mapping[str, Any]
    metrics: str
    then: Callable[[Saved], object] = _ignore
    shown: bytes = b""
    note_failure: Callable[[StoreError], object] | None = None
    is_urgent: bool = True
    peers: Peers | None = None

    # ---- copy: training waits for this

    def copy(self, part_bytes: int, buffers: Buffers, copiers: ThreadPoolExecutor) -> None:
        """Copy the state, which may change afterwards.

        Args:
            part_bytes: see `cut`.
            buffers: memory for the copy.
            copiers: threads that copy pieces in this process's memory.
        """
        self._part_bytes, self._buffers = part_bytes, buffers
        parts = cut(self.payload, part_bytes)
        self._sizes = {part.name: part.size_bytes for part in parts}
        self._writers: Peers | Alone = self.peers or Alone()
        owners = assign_owners([*self._sizes.values()], self._writers.ranks)
        self._owners = dict(zip(self._sizes, owners, strict=True))
        self._held: Held | None = None
        if self.peers is not None:
            parts, self._held = self.peers.hold(parts, self._owners)
        self._copies = {part.name: buffers.take(number, part.size_bytes) for number, part in enumerate(parts)}
        # The numbers of the buffers that are filled from a device.
        self.on_devices = [number for number, part in enumerate(parts) if _has_device_pieces(part)]
        copy_out(parts, self._copies, copiers)
        self.payload = Payload({}, None)  # free it now: to free thousands of objects later would hold the GIL

    # ---- hash and write: in other threads

    def write(
        self, near: "Near | None", last: Mapping[str, Written], shared_by: int, prepare: Callable[[], object] | None
    ) -> tuple[Saved, dict[str, Written]]:
        """Hash the copy and write it to the near folder, if there is one, and then to the store.

        Args:
            last: the parts of the last checkpoint in the same folder, by name.
            shared_by: see `Saver`.
            prepare: called in each of the save's threads when it starts.

        Returns:
            The checkpoint on the store, and its parts, by name.

        Raises:
            StoreError: the checkpoint can't be written to the store.
        """
        with (
            ThreadPoolExecutor(count_cores(), "hash", prepare) as hashing,
            ThreadPoolExecutor(WRITERS, "write", prepare) as writing,
        ):
            records = self._hash(hashing)
            if near is not None and near.is_of(self.folder):
                unlinked = [File(name, record, None, 1) for name, record in records.items()]
                size_bytes = sum(self._sizes.values())
                near.keep(size_bytes, lambda place: self._write_to(place, unlinked, writing), self._writers)
            files = [File(name, record, last.get(name), shared_by) for name, record in records.items()]
            saved = self._write_to(self.folder, files, writing)
        return saved, {file.name: file.written(saved.path) for file in files}

    def _hash(self, pool: ThreadPoolExecutor) -> dict[str, Future[FileRecord]]:
        """Begin to hash the parts that this rank writes. Return a future of each part's size and hash, by its name.

        A part whose bytes come from other ranks is hashed while it is written.
        """
        own = [name for name, owner in self._owners.items() if owner == self._writers.rank]
        return {name: Future() if self._held else pool.submit(hash_bytes, name, self._copies[name]) for name in own}

    def _write_to(self, place: Store, files: Sequence[File], pool: ThreadPoolExecutor) -> Saved:
        """Write the checkpoint to one place, and return it when it is durable and complete."""
        lines = {METRICS: self.metrics.encode()} | ({SHOWN: self.shown} if self.shown else {})
        content: Writing = (
            self._held.collect(place, files, lines, pool, self._copies, self._buffers)
            if self._held
            else Images(place, files, self._copies, lines, pool)
        )
        metadata = {**self.metadata, "part_bytes": self._part_bytes}
        return write_checkpoint(place, content, [*self._sizes], metadata, self._writers)


def copy_out(parts: Collection[Part], images: Mapping[str, memoryview], copiers: ThreadPoolExecutor) -> None:
    """Copy each part's pieces into the part's image, one contiguous buffer."""
    copying = []
    for part in parts:
        is_coarse = part.size_bytes > ONE_THREAD_BYTES * len(part.pieces)
        if is_coarse and all(isinstance(piece, Bytes) or piece.address for piece in part.pieces):
            copying.append(copiers.submit(copy_pieces, part.pieces, images[part.name]))
        else:
            # Copy in this thread: a GPU waits for the step's kernels only if the same thread queues the copy.
            copy_pieces(part.pieces, images[part.name])
    for each in copying:
        each.result()


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _has_device_pieces(part: Part) -> bool:
    return not all(isinstance(piece, Bytes) or piece.is_on_host for piece in part.pieces)
