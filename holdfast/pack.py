"""One checkpoint as one tar file, the same to the byte wherever it is made.

It holds what makes a run of its own: the commit, its files, its settings, and its signature if it has one. Names are
sorted; mode bits, owner and times are fixed. Unpacking takes nothing on trust: every byte is held against the commit.
"""

import hashlib
import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from holdfast.errors import Damage, WrongUse
from holdfast.journal import MAX_RECORD_BYTES, Commit, FileRecord, Journal, RunRecord, record_name, signature_name
from holdfast.store import PIECE_BYTES, Store, Writer

BLOCK = tarfile.BLOCKSIZE
PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


# ---- packing


def pack(journal: Journal, commit: Commit, out: Writer) -> str:
    """The checkpoint of a commit is in ``out``; returns the SHA-256 (hex) of what was written.

    Raises:
        Damage: a file is not what was committed; what was written is of no use.
    """
    whole = hashlib.sha256()
    for piece in _tar(journal, commit):
        whole.update(piece)
        out.write(piece)
    return whole.hexdigest()


def _tar(journal: Journal, commit: Commit) -> Iterator[bytes]:
    run = journal.read_run().model_copy(update={"first_commit": commit.number})
    records = {"run.json": run.to_bytes()}
    optional = (f"configs/{commit.config_fingerprint}.json", signature_name(commit))
    for name in (record_name("commits", commit.number), *filter(journal.store.exists, optional)):
        records[name] = journal.store.read(name, 0, MAX_RECORD_BYTES)
    files = {f"{commit.path}/{file.name}": file for file in commit.files}
    total = 2 * BLOCK
    for name in sorted(records.keys() | files.keys()):
        size_bytes = files[name].size_bytes if name in files else len(records[name])
        info = tarfile.TarInfo(f"{journal.run}/{name}")
        info.size = size_bytes
        yield info.tobuf(tarfile.GNU_FORMAT)
        yield from _pieces(journal.store, name, files[name]) if name in files else [records[name]]
        yield bytes(_padding(size_bytes))
        total += BLOCK + size_bytes + _padding(size_bytes)
    yield bytes(2 * BLOCK + -total % tarfile.RECORDSIZE)


def _pieces(store: Store, name: str, file: FileRecord) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for piece in store.pieces(name):
        digest.update(piece)
        yield piece
    _compare(name, file, digest.hexdigest())


def _padding(size_bytes: int) -> int:
    return -size_bytes % BLOCK


def _compare(name: str, file: FileRecord, found: str) -> None:
    if found != file.sha256:
        raise Damage(f"{name} is {found} but was committed as {file.sha256}")


# ---- unpacking


def unpack(tar: BinaryIO, store: Store) -> Journal:
    """The run that was packed is on the store under its own name, with one commit, whose files were verified.

    Raises:
        Damage: the file is not a packed checkpoint, or a byte of it has changed; there is no run.
        WrongUse: the store has a folder of this name.
    """
    run, name, size_bytes = _read_header(tar)
    if not re.fullmatch(r"commits/[0-9]{8}\.json", name):
        raise Damage(f"the file is not a packed checkpoint: it begins with {name}")
    journal = Journal(store, run)
    if journal.store.list():
        raise WrongUse(f"there is a folder {run} in {store.url}", hint="unpack into another store")
    record = _read(tar, name, size_bytes)
    commit = Commit.from_bytes(record, name)
    if record_name("commits", commit.number) != name:
        raise Damage(f"{name} says that it is commit {commit.number}")
    try:
        records = _copy_all(tar, journal, commit)
        # It is a run once run.json is there.
        for name, data in [*records.items(), (record_name("commits", commit.number), record)]:
            if name != "run.json":
                journal.store.create(name, data)
        journal.store.create("run.json", records["run.json"])
    except BaseException:
        store.delete_folder(run)
        raise
    return journal


def _copy_all(tar: BinaryIO, journal: Journal, commit: Commit) -> dict[str, bytes]:
    """Each file of the checkpoint is on the store, and is what was committed; returns the records beside them."""
    files = {f"{commit.path}/{file.name}": file for file in commit.files}
    optional = {f"configs/{commit.config_fingerprint}.json", signature_name(commit)}
    records: dict[str, bytes] = {}
    waiting = files.keys() | optional | {"run.json"}
    while not _is_at_end(header := _read_header(tar)):
        run, name, size_bytes = header
        if run != journal.run or name not in waiting:
            raise Damage(f"{run}/{name} is not part of this checkpoint, or is there twice")
        waiting.remove(name)
        if name in files:
            _copy(tar, journal.store, name, size_bytes, files[name])
        else:
            records[name] = _read(tar, name, size_bytes)
    missing = sorted(waiting - optional)
    if missing:
        raise Damage(f"the file has no {missing[0]}")
    if RunRecord.from_bytes(records["run.json"], "run.json").run != journal.run:
        raise Damage(f"run.json is not that of run {journal.run!r}")
    return records


def _read_header(tar: BinaryIO) -> tuple[str, str, int]:
    """Run, name in the run, and size of the next file; nothing in all three at the end.

    Read a block at a time, so that what is no plain file with a plain name gets no further than this.
    """
    block = tar.read(BLOCK)
    if block == bytes(BLOCK):
        return "", "", 0
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise Damage(f"the file is not a packed checkpoint: {error}") from None
    if info.type != tarfile.REGTYPE or info.linkname:
        raise Damage(f"{info.name!r} is a link, a device or something else that is no plain file")
    name = re.fullmatch(rf"({PART})/((?:{PART}/)?{PART})", info.name)
    if name is None or info.size < 0:
        raise Damage(f"{info.name!r} is not a file of a run")
    return name[1], name[2], info.size


def _is_at_end(header: tuple[str, str, int]) -> bool:
    return not header[0]


def _read(tar: BinaryIO, name: str, size_bytes: int) -> bytes:
    if size_bytes > MAX_RECORD_BYTES:
        raise Damage(f"{name} claims {size_bytes} bytes; a record has at most {MAX_RECORD_BYTES}")
    return b"".join(_take(tar, name, size_bytes))


def _copy(tar: BinaryIO, run: Store, name: str, size_bytes: int, file: FileRecord) -> None:
    if size_bytes != file.size_bytes:
        raise Damage(f"{name} has {size_bytes} bytes but was committed with {file.size_bytes}")
    digest = hashlib.sha256()
    with run.creating(name) as writer:
        for piece in _take(tar, name, size_bytes):
            digest.update(piece)
            writer.write(piece)
        _compare(name, file, digest.hexdigest())


def _take(tar: BinaryIO, name: str, size_bytes: int) -> Iterator[bytes]:
    """The next bytes, and past their padding."""
    left = size_bytes
    while left:
        piece = tar.read(min(left, PIECE_BYTES))
        if not piece:
            raise Damage(f"the file ends within {name}")
        left -= len(piece)
        yield piece
    tar.read(_padding(size_bytes))
