"""A checkpoint that is on the store: read, and held against what its commit says."""

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from holdfast.checkpoint.format import PAYLOAD, Payload, deserialize
from holdfast.checkpoint.saving import FILES, METADATA, Metadata, Saved, hash_file, is_folder_name, step_of
from holdfast.errors import CheckpointDamaged, NameMissing, RecordDamaged, RunStopped
from holdfast.journal import Commit, FileRecord, read_record
from holdfast.store import Store

Watch = Callable[[int], None]


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


def read_payload(run: Store, commit: Commit) -> Payload:
    """The committed state, verified while it was read: these bytes hash to what the commit says.

    The tensors share one buffer, which nothing else refers to.

    Raises:
        CheckpointDamaged: a file is missing or differs; ``data["files"]`` says how.
        RunStopped: it is larger than this machine's memory.
    """
    by_name = {file.name: file for file in commit.files}
    missing = [name for name in FILES if name not in by_name]
    if missing:
        raise CheckpointDamaged(f"commit {commit.number} names no {missing[0]}")
    file = by_name.pop(PAYLOAD)
    damaged = [damage for file in by_name.values() for damage in verify_file(run, commit.path, file)]
    if damaged:
        raise _damage(commit, damaged)
    damaged = list(_size_damage(run, commit.path, file))
    if damaged:
        raise _damage(commit, damaged)
    try:
        buffer = bytearray(file.size_bytes)
    except MemoryError:
        raise RunStopped(
            f"checkpoint {commit.path} has {file.size_bytes:,} bytes, for which this machine has no memory"
        ) from None
    position = 0
    digest = hashlib.sha256()
    for piece in run.pieces(f"{commit.path}/{PAYLOAD}"):
        digest.update(piece)
        buffer[position : position + len(piece)] = piece
        position += len(piece)
        if position > file.size_bytes:  # it grows while it is read
            break
    if digest.hexdigest() != file.sha256:
        raise _damage(commit, [FileDamage(commit.path, PAYLOAD, file.sha256, digest.hexdigest())])
    return deserialize(buffer)


def read_saved(run: Store, saved: Saved) -> Payload:
    """The state of a checkpoint that no commit names; its bytes are not held against anything.

    Raises:
        CheckpointDamaged: it is not a well-formed safetensors file of ours.
    """
    return deserialize(bytearray(run.read(f"{saved.path}/{PAYLOAD}")))


# ---- verifying


def check_saved(run: Store, saved: Saved) -> None:
    """Return if every file that was reported is on the store, whole, and the payload is the one it is named after.

    The bytes are not read back: they were hashed on their way to the disk.

    Raises:
        CheckpointDamaged: a file is missing or of another size, or the hashes contradict each other.
    """
    damaged = [damage for file in saved.files for damage in _size_damage(run, saved.path, file)]
    by_name = {file.name: file.sha256 for file in saved.files}
    if by_name.get(PAYLOAD) != saved.metadata.checkpoint_sha256:
        found = str(by_name.get(PAYLOAD))
        damaged.append(FileDamage(saved.path, PAYLOAD, saved.metadata.checkpoint_sha256, found))
    if damaged:
        raise CheckpointDamaged(
            f"checkpoint {saved.path} was damaged while it was saved: {'; '.join(map(str, damaged))}",
            files=[vars(damage) for damage in damaged],
        )


def verify(run: Store, commit: Commit, watch: Watch = lambda size_bytes: None) -> list[FileDamage]:
    """Read every byte of a committed checkpoint back; what differs, file by file.

    Args:
        watch: called with the size of each piece that was read.
    """
    return [damage for file in commit.files for damage in verify_file(run, commit.path, file, watch)]


def verify_file(
    run: Store, path: str, file: FileRecord, watch: Watch = lambda size_bytes: None
) -> Iterator[FileDamage]:
    """How one file differs from its record, if it does."""
    damage = next(_size_damage(run, path, file), None)
    if damage is None:
        found = hash_file(run, path, file.name, watch).sha256
        if found == file.sha256:
            return
        damage = FileDamage(path, file.name, file.sha256, found)
    yield damage


def _size_damage(run: Store, path: str, file: FileRecord) -> Iterator[FileDamage]:
    try:
        size_bytes = run.size_bytes(f"{path}/{file.name}")
    except NameMissing:
        yield FileDamage(path, file.name, f"{file.size_bytes} bytes", "missing")
        return
    if size_bytes != file.size_bytes:
        yield FileDamage(path, file.name, f"{file.size_bytes} bytes", f"{size_bytes} bytes")


def find_orphans(
    run: Store,
    head: Commit | None,
    config_fingerprints: Collection[str],
    steps_per_epoch: int,
    given_up: Callable[[], set[str]] = set,
) -> Iterator[Saved]:
    """Complete checkpoints that were trained from ``head``, the newest commit, furthest first, verified.

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
    for _, path, metadata in sorted(found, key=lambda entry: entry[:2], reverse=True):
        if path in excluded:
            continue
        try:
            files = [hash_file(run, path, name) for name in FILES]
        except NameMissing:
            continue
        if files[FILES.index(PAYLOAD)].sha256 == metadata.checkpoint_sha256:
            yield Saved(path=path, files=files, metadata=metadata)


def _damage(commit: Commit, damaged: list[FileDamage]) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"checkpoint {commit.path} (commit {commit.number}) is damaged: {'; '.join(map(str, damaged))}",
        hint="the run continues from the newest checkpoint that verifies",
        commit=commit.number,
        files=[vars(damage) for damage in damaged],
    )
