"""Helpers that pack, unpack and list packed checkpoints in memory."""

import hashlib
import io
import tarfile
from pathlib import Path

from holdfast.extensions.pack.pack import pack, unpack
from holdfast.journal import Journal
from holdfast.store.local import LocalStore

Members = list[tuple[tarfile.TarInfo, bytes]]


def packed(journal: Journal, number: int = 0) -> bytes:
    """Pack a commit, or the newest one; return the bytes of the file."""
    out = io.BytesIO()
    commit = journal.read_commit(number) if number else journal.newest()
    assert commit
    assert pack(journal, commit, out) == hashlib.sha256(out.getvalue()).hexdigest()
    return out.getvalue()


def unpacked(data: bytes, store: LocalStore) -> Journal:
    """Unpack the bytes of a file into a store; return the journal of the run."""
    return unpack(io.BytesIO(data), store)


def members(data: bytes) -> Members:
    """Return the members that `tarfile` finds in the bytes of a file, each with its content."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member, opened.read() if (opened := tar.extractfile(member)) else b"") for member in tar]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
