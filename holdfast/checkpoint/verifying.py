"""A checkpoint that is on the store: read, and held against what its commit says."""

import functools
import hashlib
import logging
import queue
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.checkpoint.files import hash_file
from holdfast.checkpoint.format import PAYLOAD, Payload, deserialize, is_part, part_name
from holdfast.checkpoint.metadata import METADATA, METRICS, Metadata, Saved, content_id, is_folder_name, step_of
from holdfast.checkpoint.progress import Sums, disagree, read_sums
from holdfast.checkpoint.trail import Trail, continues, read_known_trail, read_trail
from holdfast.errors import CheckpointDamaged, NameMissing, RecordDamaged, RunStopped
from holdfast.journal import Commit, FileRecord, read_record
from holdfast.memory import Buffers, Priority
from holdfast.store import Store

# How many files are read and hashed at once, where there are more than a few: while some wait for the disk, as many as
# there are processors are hashed.
READERS = 8
FEW = 3

Watch = Callable[[int], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileDamage:
    """How one file of a checkpoint differs from its commit."""

    path: str
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}/{self.name} is {self.found} but was committed as {self.expected}"


def read_metadata(run: Store, path: str) -> Metadata | None:
    """A checkpoint's metadata; None where there is none, which means that it was never completed.

    Raises:
        RecordDamaged: it can't be read.
    """
    try:
        return read_record(run, Metadata, f"{path}/{METADATA}")
    except NameMissing:
        return None


def read_payload(run: Store, commit: Commit, buffers: Buffers | None = None) -> Payload:
    """The committed state, verified while it was read: these bytes hash to what the commit says.

    Args:
        buffers: the memory that the bytes are put in, and that the tensors are views of; they keep it as long as they
            are there. Of their own without.

    Raises:
        CheckpointDamaged: a file is missing or differs; ``data["files"]`` says how.
        RunStopped: it is larger than this machine's memory.
    """
    parts = find_parts(commit)
    others = [file for file in commit.files if file not in parts]
    damaged = _find(functools.partial(_verify_file, run, commit.path), others)
    damaged = damaged or _find(functools.partial(_size_damage, run, commit.path), parts)
    if damaged:
        raise _damage(commit, damaged)
    buffers = buffers or Buffers()
    try:
        images = [buffers.lend(number, part.size_bytes) for number, part in enumerate(parts)]
    except MemoryError:
        size_bytes = sum(part.size_bytes for part in parts)
        raise RunStopped(
            f"checkpoint {commit.path} has {size_bytes:,} bytes, for which this machine has no memory"
        ) from None
    with ThreadPoolExecutor(READERS, "read") as readers:
        fill = functools.partial(_fill, run, commit.path, dict(zip(parts, images, strict=True)), readers)
        if damaged := _find(fill, parts, waits=True):  # the memory is used again
            raise _damage(commit, damaged)
    return deserialize(images)


def _fill(
    run: Store, path: str, images: Mapping[FileRecord, memoryview], readers: ThreadPoolExecutor, part: FileRecord
) -> FileDamage | None:
    """The part's image has its bytes; or how they are damaged. They are hashed while more of them are read."""
    image = images[part]
    ends = queue.SimpleQueue[int | None]()

    def read() -> None:
        try:
            for end in run.fill(f"{path}/{part.name}", image):
                ends.put(end)
        finally:
            ends.put(None)

    reading = readers.submit(read)
    digest, filled = hashlib.sha256(), 0
    for end in iter(ends.get, None):
        digest.update(image[filled:end])
        filled = end
    reading.result()
    found = digest.hexdigest()
    return None if found == part.sha256 else FileDamage(path, part.name, part.sha256, found)


def find_parts(commit: Commit) -> list[FileRecord]:
    """The files of a commit that hold the state, in order.

    Raises:
        CheckpointDamaged: it doesn't name all that a checkpoint has.
    """
    by_name = {file.name: file for file in commit.files}
    parts = [by_name[name] for name in sorted(by_name) if is_part(name)]
    needed = [part_name(number, len(parts)) for number in range(1, len(parts) + 1)] or [PAYLOAD]
    missing = [name for name in (*needed, METADATA, METRICS) if name not in by_name]
    if missing:
        raise CheckpointDamaged(f"commit {commit.number} names no {missing[0]}")
    if content_id(parts) != commit.checkpoint_sha256:
        raise CheckpointDamaged(f"commit {commit.number} names no {PAYLOAD} that is {commit.checkpoint_sha256}")
    return parts


def read_saved(run: Store, saved: Saved) -> Payload:
    """The state of a checkpoint that no commit names; its bytes are not held against anything.

    Raises:
        CheckpointDamaged: it is not made of well-formed safetensors files of ours.
    """
    return deserialize([bytearray(run.read(f"{saved.path}/{part.name}")) for part in saved.metadata.parts])


# ---- verifying


def check_saved(run: Store, saved: Saved) -> None:
    """Return if every file that was reported is on the store, whole, and the payload is the one it is named after.

    The bytes are not read back: they were hashed on their way to the disk.

    Raises:
        CheckpointDamaged: a file is missing or of another size, or the hashes contradict each other.
    """
    damaged = _find(functools.partial(_size_damage, run, saved.path), saved.files)
    found = content_id([file for file in saved.files if is_part(file.name)])
    if found != saved.metadata.checkpoint_sha256:
        damaged.append(FileDamage(saved.path, PAYLOAD, saved.metadata.checkpoint_sha256, found))
    if damaged:
        raise CheckpointDamaged(
            f"checkpoint {saved.path} was damaged while it was saved: {'; '.join(map(str, damaged))}",
            files=[vars(damage) for damage in damaged],
        )


def verify(
    run: Store, commit: Commit, watch: Watch = lambda size_bytes: None, *, is_urgent: bool = True
) -> list[FileDamage]:
    """Read every byte of a committed checkpoint back; what differs, file by file.

    Args:
        watch: called with the size of each piece that was read, perhaps by several threads at once.
        is_urgent: otherwise its threads have only what others leave of the processors.
    """
    priority = None if is_urgent else Priority()
    return _find(functools.partial(_verify_file, run, commit.path, watch=watch), commit.files, priority)


def _verify_file(run: Store, path: str, file: FileRecord, watch: Watch = lambda size_bytes: None) -> FileDamage | None:
    """How one file differs from its record, if it does."""
    if damage := _size_damage(run, path, file):
        return damage
    found = hash_file(run, path, file.name, watch).sha256
    return None if found == file.sha256 else FileDamage(path, file.name, file.sha256, found)


def _size_damage(run: Store, path: str, file: FileRecord) -> FileDamage | None:
    try:
        size_bytes = run.size_bytes(f"{path}/{file.name}")
    except NameMissing:
        return FileDamage(path, file.name, f"{file.size_bytes} bytes", "missing")
    if size_bytes != file.size_bytes:
        return FileDamage(path, file.name, f"{file.size_bytes} bytes", f"{size_bytes} bytes")
    return None


def _find(
    look: Callable[[FileRecord], FileDamage | None],
    files: Sequence[FileRecord],
    priority: Priority | None = None,
    *,
    waits: bool = False,
) -> list[FileDamage]:
    """What is found in each of the files, in their order; several are looked at at once, if there are many.

    Args:
        waits: for those that are being looked at, where another one raises. Who is told to stop has no time for that.
    """
    if len(files) <= FEW and priority is None:
        return [damage for damage in map(look, files) if damage is not None]
    pool = ThreadPoolExecutor(READERS, "verify", priority.lower if priority else None)
    try:
        return [damage for damage in pool.map(look, files) if damage is not None]
    finally:
        if priority:
            priority.restore()
        pool.shutdown(wait=waits, cancel_futures=True)


def find_orphans(
    run: Store,
    head: Commit | None,
    config_fingerprints: Collection[str],
    steps_per_epoch: int,
    given_up: Callable[[], set[str]] = set,
) -> Iterator[Saved]:
    """Find the complete checkpoints that were trained from ``head``, the newest commit; furthest first, verified.

    What a checkpoint says of its parent can be rewritten. So its trail must go on where the parent's ends, and the
    losses in its state must follow from the parent's.

    Args:
        head: the commit that they must have been trained from; None for the very beginning.
        config_fingerprints: the settings that they may have been trained with.
        given_up: the folders that are not to be used again; asked only if there is something to use.
    """
    parent, step = (head.checkpoint_sha256, head.step) if head else ("", 0)
    found = []
    for path in run.list():
        if not is_folder_name(path) or step_of(path, steps_per_epoch) <= step:
            continue
        try:
            metadata = read_metadata(run, path)
        except RecordDamaged:
            continue
        if (
            metadata is not None
            and metadata.previous_checkpoint_sha256 == parent
            and metadata.config_fingerprint in config_fingerprints
        ):
            found.append((metadata.optimizer_steps_total, path, metadata))
    excluded = given_up() if found else set()
    before: Trail | None = None
    for _, path, metadata in sorted(found, key=lambda entry: entry[:2], reverse=True):
        if path in excluded:
            continue
        before = before or (read_known_trail(run, head.path, head.step) if head else Trail(0))
        try:
            trail = read_trail(run, path)
            problem = continues(before, trail) or _misses_the_end(trail, metadata)
            problem = problem or _disagrees(run, head, path, metadata, trail, steps_per_epoch)
            if problem:
                raise RecordDamaged(problem)
            described = hash_file(run, path, METADATA)
            damaged = _find(functools.partial(_verify_file, run, path), metadata.parts)
        except NameMissing:
            continue
        except RecordDamaged as error:
            log.warning("%s is not adopted: %s", path, error)
            continue
        if not damaged and content_id(metadata.parts) == metadata.checkpoint_sha256:
            assert trail.file is not None
            yield Saved(path=path, files=[*metadata.parts, trail.file, described], metadata=metadata)


def _misses_the_end(trail: Trail, metadata: Metadata) -> str:
    last = metadata.optimizer_steps_total
    return "" if trail.step == last else f"its trail ends with step {trail.step} and not with step {last}"


def _disagrees(
    run: Store, head: Commit | None, path: str, metadata: Metadata, trail: Trail, steps_per_epoch: int
) -> str:
    before = read_sums(run, head.path, find_parts(head)) if head else Sums()
    return disagree(before, trail.losses, read_sums(run, path, metadata.parts), steps_per_epoch)


def _damage(commit: Commit, damaged: list[FileDamage]) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"checkpoint {commit.path} (commit {commit.number}) is damaged: {'; '.join(map(str, damaged))}",
        hint="the run continues from the newest checkpoint that verifies",
        commit=commit.number,
        files=[vars(damage) for damage in damaged],
    )
