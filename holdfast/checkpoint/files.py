"""Single files of a checkpoint: written once, and hashed."""

import hashlib
from collections.abc import Callable

from holdfast.errors import NameMissing, NameTaken
from holdfast.journal import FileRecord
from holdfast.store import Bytes, Store


def write_file(run: Store, path: str, name: str, data: bytes) -> FileRecord:
    """The file is there, with these bytes.

    Raises:
        NameTaken: it is there with others.
    """
    record = hash_bytes(name, data)
    try:
        run.create(f"{path}/{name}", data)
    except NameTaken as taken:
        check_same(run, path, record, taken)
    return record


def check_same(run: Store, path: str, record: FileRecord, taken: NameTaken) -> None:
    """Return if what has the name is, to the byte, what was to be written; otherwise raise ``taken``."""
    try:
        there = hash_file(run, path, record.name)
    except NameMissing:  # the remains of an upload that never ended hold the name, on some object stores
        raise taken from None
    if there != record:
        raise taken


def hash_bytes(name: str, data: Bytes) -> FileRecord:
    """A file with these bytes."""
    return FileRecord(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def hash_file(run: Store, path: str, name: str, watch: Callable[[int], None] = lambda size_bytes: None) -> FileRecord:
    """One file as it is now.

    Args:
        watch: called with the size of each piece that was read.
    """
    digest, size_bytes = hashlib.sha256(), 0
    for piece in run.pieces(f"{path}/{name}"):
        digest.update(piece)
        size_bytes += len(piece)
        watch(len(piece))
    return FileRecord(name=name, size_bytes=size_bytes, sha256=digest.hexdigest())
