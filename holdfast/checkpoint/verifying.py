"""Reading checkpoints from the store, and verifying them against their commits."""

import contextlib
import functools
import hashlib
import logging
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from holdfast.checkpoint.files import FileDamage, damage_error, hash_file
from holdfast.checkpoint.format import PAYLOAD, deserialize, is_part, part_name
from holdfast.checkpoint.metadata import (
    METADATA,
    METRICS,
    Metadata,
    Saved,
    content_id,
    is_folder_name,
    read_metadata,
    step_of,
)
from holdfast.checkpoint.payload import Payload
from holdfast.checkpoint.progress import Sums, find_disagreement, read_sums
from holdfast.checkpoint.trail import Trail, find_break, read_known_trail, read_trail
from holdfast.errors import CheckpointDamaged, NameMissing, RecordDamaged, RunStopped
from holdfast.journal import Commit, FileRecord
from holdfast.memory import Buffers, Priority, SharedBuffers
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.checkpoint.near import NearReader

# The number of files that are read and hashed at once. It may exceed the number of processors, because some reads wait
# for the disk.
READERS = 8
# Up to this many files are checked one after the other, without threads.
FEW = 3

Watch = Callable[[int], None]

log = logging.getLogger(__name__)


def read_payload(
    folder: Store, commit: Commit, buffers: Buffers | SharedBuffers | None = None, near: "NearReader | None" = None
) -> Payload:
    """Read a committed state, and verify its bytes against the hashes in the commit while they are read.

    Args:
        buffers: memory for the bytes; None to allocate new memory. The payload's tensors are views of this memory and
            keep it alive.
        near: the near copies, from which each part is read if a copy is undamaged.

    Raises:
        CheckpointDamaged: a file is missing or differs; ``data["files"]`` describes each damage.
        RunStopped: the checkpoint is larger than this machine's memory.
    """
    parts = find_parts(commit)
    check_others(folder, commit, parts)
    buffers = buffers or Buffers()
    try:
        images = [buffers.lend(number, part.size_bytes) for number, part in enumerate(parts)]
    except MemoryError:
        size_bytes = sum(part.size_bytes for part in parts)
        raise RunStopped(
            f"checkpoint {commit.path} has {size_bytes:,} bytes, and this machine has less free memory"
        ) from None
    with ThreadPoolExecutor(READERS, "read") as readers:
        own = dict(zip(parts, images, strict=True))

        def fill(part: FileRecord) -> FileDamage | None:
            if near is not None and near.take(part, functools.partial(fill_part, images=own, readers=readers)):
                return None
            return fill_part(folder, commit.path, part, own, readers)

        # Wait for all threads, because the next read may use the same memory.
        if damaged := _check_files(fill, parts, waits=True):
            raise damage_error(commit, damaged)
    return deserialize(images)


def check_others(folder: Store, commit: Commit, parts: Sequence[FileRecord]) -> None:
    """Verify all files of a commit that aren't parts of its state. Of the given parts, verify only the sizes.

    Raises:
        CheckpointDamaged: a file is missing or differs.
    """
    others = [file for file in commit.files if not is_part(file.name)]
    damaged = _check_files(functools.partial(verify_file, folder, commit.path), others)
    damaged = damaged or _check_files(functools.partial(_size_damage, folder, commit.path), parts)
    if damaged:
        raise damage_error(commit, damaged)


def fill_part(
    folder: Store, path: str, part: FileRecord, images: Mapping[FileRecord, memoryview], readers: ThreadPoolExecutor
) -> FileDamage | None:
    """Read a part into its memory in ``images``, and hash it in a second thread. Return its damage, if any."""
    image = images[part]
    ends = queue.SimpleQueue[int | None]()

    def read() -> None:
        try:
            for end in folder.fill(f"{path}/{part.name}", image):
                ends.put(end)
        finally:
            ends.put(None)

    reading = readers.submit(read)
    digest, filled = hashlib.sha256(), 0
    for end in iter(ends.get, None):
        digest.update(image[filled:end])
        filled = end
    try:
        reading.result()
    except NameMissing:  # the file was deleted after its size was read
        return FileDamage.missing(path, part)
    found = digest.hexdigest()
    return None if found == part.sha256 else FileDamage(path, part.name, part.sha256, found)


def find_parts(commit: Commit) -> list[FileRecord]:
    """Return the records of a commit's parts, the files that hold the state, in order.

    Raises:
        CheckpointDamaged: the commit lacks a file that each checkpoint has, or the content id of its parts differs.
    """
    by_name = {file.name: file for file in commit.files}
    parts = [by_name[name] for name in sorted(by_name) if is_part(name)]
    needed = [part_name(number, len(parts)) for number in range(1, len(parts) + 1)] or [PAYLOAD]
    missing = [name for name in (*needed, METADATA, METRICS) if name not in by_name]
    if missing:
        raise CheckpointDamaged(f"the record of commit {commit.number} lists no file {missing[0]}")
    if content_id(parts) != commit.checkpoint_sha256:
        raise CheckpointDamaged(
            f"the record of commit {commit.number} contradicts itself: the files that it lists don't have the content "
            f"id that it states, {commit.checkpoint_sha256}"
        )
    return parts


def read_saved(folder: Store, saved: Saved) -> Payload:
    """Read the state of a checkpoint that no commit names yet, without verifying its bytes.

    Raises:
        CheckpointDamaged: a file is not well-formed safetensors of this format.
    """
    return deserialize([bytearray(folder.read(f"{saved.path}/{part.name}")) for part in saved.metadata.parts])


# ---- verifying


def check_saved(folder: Store, saved: Saved) -> None:
    """Check that the store has every file of a saved checkpoint in its full size, and that its content id is right.

    The bytes are not read back: they were hashed while they were written.

    Raises:
        CheckpointDamaged: a file is missing or has a different size, or the parts have a different content id.
    """
    damaged = _check_files(functools.partial(_size_damage, folder, saved.path), saved.files)
    found = content_id([file for file in saved.files if is_part(file.name)])
    if found != saved.metadata.checkpoint_sha256:
        damaged.append(FileDamage(saved.path, PAYLOAD, saved.metadata.checkpoint_sha256, found))
    if damaged:
        raise CheckpointDamaged(
            f"checkpoint {saved.path} was damaged while it was saved: {'; '.join(map(str, damaged))}",
            files=[vars(damage) for damage in damaged],
        )


def verify(
    folder: Store, commit: Commit, watch: Watch = lambda size_bytes: None, *, is_urgent: bool = True
) -> list[FileDamage]:
    """Read back every byte of a committed checkpoint, and return the files that are damaged.

    Args:
        watch: called with the size in bytes of each piece after it is read, perhaps by several threads at once.
        is_urgent: False gives the reading threads the lowest priority, so that training goes first.
    """
    priority = None if is_urgent else Priority()
    return _check_files(functools.partial(verify_file, folder, commit.path, watch=watch), commit.files, priority)


def verify_file(
    folder: Store, path: str, file: FileRecord, watch: Watch = lambda size_bytes: None
) -> FileDamage | None:
    """Read back one file and return how it differs from its record; None if both are equal."""
    if damage := _size_damage(folder, path, file):
        return damage
    try:
        found = hash_file(folder, path, file.name, watch).sha256
    except NameMissing:  # the file was deleted after its size was read
        return FileDamage.missing(path, file)
    return None if found == file.sha256 else FileDamage(path, file.name, file.sha256, found)


def _size_damage(folder: Store, path: str, file: FileRecord) -> FileDamage | None:
    try:
        size_bytes = folder.size_bytes(f"{path}/{file.name}")
    except NameMissing:
        return FileDamage.missing(path, file)
    if size_bytes != file.size_bytes:
        return FileDamage(path, file.name, f"{file.size_bytes} bytes", f"{size_bytes} bytes")
    return None


def _check_files(
    check: Callable[[FileRecord], FileDamage | None],
    files: Sequence[FileRecord],
    priority: Priority | None = None,
    *,
    waits: bool = False,
) -> list[FileDamage]:
    """Check files, several at once if there are many. Return the damage that was found, in the order of the files.

    Args:
        waits: whether to wait for the running checks if one check raises. False by default, so that a stop is quick.
    """
    if len(files) <= FEW and priority is None:
        return [damage for damage in map(check, files) if damage is not None]
    pool = ThreadPoolExecutor(READERS, "verify", priority.lower if priority else None)
    try:
        return [damage for damage in pool.map(check, files) if damage is not None]
    finally:
        if priority:
            priority.restore()
        pool.shutdown(wait=waits, cancel_futures=True)


def find_orphans(
    folder: Store,
    head: Commit | None,
    is_expected: Callable[[str], bool],
    steps_per_epoch: int,
    find_excluded: Callable[[], set[str]] = set,
    *,
    place: Store | None = None,
) -> Iterator[Saved]:
    """Yield verified checkpoints that no commit names and that were trained from ``head``, the latest step first.

    Anyone who can write to the store could have rewritten the parent's name in a checkpoint's metadata. So the
    checkpoint's trail must also continue the parent's trail. The sums of losses in its state must equal the parent's
    sums plus the losses in the trail.

    Args:
        head: the newest commit; None before the run's first commit.
        is_expected: returns whether a checkpoint with this fingerprint may be used.
        find_excluded: returns the folders that must not be used again; called only if there are candidates.
        place: the folder to search: the run's folder in a near folder; None for ``folder`` itself.
    """
    place = place or folder
    found = _find_children(place, head, is_expected, steps_per_epoch)
    excluded = find_excluded() if found else set()
    before: Trail | None = None
    for path, metadata in found:
        if path in excluded:
            continue
        before = before or (read_known_trail(folder, head.path, head.step) if head else Trail(0))
        try:
            trail = read_trail(place, path)
            problem = find_break(before, trail) or _find_wrong_end(trail, metadata)
            if not problem:
                sums = read_sums(folder, head.path, find_parts(head)) if head else Sums()
                problem = find_disagreement(sums, trail.losses, read_sums(place, path, metadata.parts), steps_per_epoch)
            if problem:
                raise RecordDamaged(problem)
            described = hash_file(place, path, METADATA)
            shown = [metadata.shown] if metadata.shown else []
            damaged = _check_files(functools.partial(verify_file, place, path), [*metadata.parts, *shown])
        except NameMissing:
            continue
        except RecordDamaged as error:
            log.warning("%s is not adopted: %s", path, error)
            continue
        if not damaged and content_id(metadata.parts) == metadata.checkpoint_sha256:
            assert trail.file is not None
            files = [*metadata.parts, trail.file, *shown, described]
            yield Saved(path=path, files=files, metadata=metadata, train_s=metadata.train_s)


def _find_children(
    folder: Store, head: Commit | None, is_expected: Callable[[str], bool], steps_per_epoch: int
) -> list[tuple[str, Metadata]]:
    """Return the folders whose metadata names ``head`` as parent, with the metadata; the latest step first."""
    parent, step = (head.checkpoint_sha256, head.step) if head else ("", 0)
    found = []
    for path in folder.list():
        if not is_folder_name(path) or step_of(path, steps_per_epoch) <= step:
            continue
        with contextlib.suppress(RecordDamaged):
            metadata = read_metadata(folder, path)
            if (
                metadata is not None
                and metadata.previous_checkpoint_sha256 == parent
                and is_expected(metadata.config_fingerprint)
            ):
                found.append((path, metadata))
    return sorted(found, key=lambda entry: (entry[1].optimizer_steps_total, entry[0]), reverse=True)


def _find_wrong_end(trail: Trail, metadata: Metadata) -> str:
    last = metadata.optimizer_steps_total
    return "" if trail.step == last else f"its trail ends with step {trail.step} and not with step {last}"


def is_there(folder: Store, commit: Commit) -> bool:
    """Return whether the store still lists every file of a committed checkpoint. The bytes are not read."""
    return {file.name for file in commit.files} <= {*folder.list(commit.path)}
