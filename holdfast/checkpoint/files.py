"""Creating, hashing and comparing single files of a checkpoint."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from holdfast.errors import CheckpointDamaged, NameMissing, NameTaken
from holdfast.journal import Commit, FileRecord
from holdfast.store import Bytes, Store


@dataclass(frozen=True)
class FileDamage:
    """A difference between one file of a checkpoint and the file's record in the commit."""

    path: str
    name: str
    expected: str
    found: str

    @classmethod
    def missing(cls, path: str, file: FileRecord) -> Self:
        """Return the `FileDamage` of a file that doesn't exist."""
        return cls(path, file.name, f"{file.size_bytes} bytes", "missing")

    def __str__(self) -> str:
        return f"{self.path}/{self.name} is {self.found} but was committed as {self.expected}"


def damage_error(commit: Commit, damaged: list[FileDamage]) -> CheckpointDamaged:
    """Return the error for a commit whose files are damaged."""
    return CheckpointDamaged(
        f"checkpoint {commit.path} (commit {commit.number}) is damaged: {'; '.join(map(str, damaged))}",
        hint="the run continues from the newest undamaged checkpoint; holdfast verify lists the damaged ones",
        commit=commit.number,
        files=[vars(damage) for damage in damaged],
    )


def write_file(folder: Store, path: str, name: str, data: bytes) -> FileRecord:
    """Create a file of a checkpoint and return its record. If the file already exists with the same bytes, succeed.

    Raises:
        NameTaken: the file exists with different bytes.
    """
    record = hash_bytes(name, data)
    try:
        folder.create(f"{path}/{name}", data)
    except NameTaken as taken:
        check_same_file(folder, path, record, taken)
    return record


def check_same_file(folder: Store, path: str, record: FileRecord, taken: NameTaken) -> None:
    """Raise ``taken`` unless the existing file has the size and hash in ``record``, which describes the new file."""
    try:
        there = hash_file(folder, path, record.name)
    except NameMissing:  # on some object stores an unfinished upload occupies the name, but can't be read
        raise taken from None
    if there != record:
        raise taken


def hash_bytes(name: str, data: Bytes) -> FileRecord:
    """Return the record (name, size, SHA-256) of a file with these bytes."""
    return FileRecord(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def hash_file(
    folder: Store, path: str, name: str, watch: Callable[[int], None] = lambda size_bytes: None
) -> FileRecord:
    """Read a file of a checkpoint from the store, and return a record with its present size and SHA-256.

    Args:
        path: the checkpoint's folder inside the run's folder.
        watch: called with the size in bytes of each piece after it is read.

    Raises:
        NameMissing: there is no such file.
    """
    digest, size_bytes = hashlib.sha256(), 0
    for piece in folder.pieces(f"{path}/{name}"):
        digest.update(piece)
        size_bytes += len(piece)
        watch(len(piece))
    return FileRecord(name=name, size_bytes=size_bytes, sha256=digest.hexdigest())
