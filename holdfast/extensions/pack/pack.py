"""A checkpoint as one tar file, whose bytes are the same wherever it is packed.

The file contains a complete run: the commit, its files, its settings, and its signature if it has one. Names are
sorted; mode bits, owner and times are fixed. Unpacking trusts nothing: it checks every byte against the commit. Only
the signature is copied unchecked, because training with ``trusted_keys`` checks it later.
"""

import hashlib
import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from holdfast.checkpoint import find_parts
from holdfast.errors import CheckpointDamaged, Damage, NameMissing, NameTaken, WrongUse
from holdfast.journal import (
    MAX_RECORD_BYTES,
    Commit,
    ConfigRecord,
    FileRecord,
    FolderRecord,
    Journal,
    RunRecord,
    config_name,
    folder_record_name,
    now,
    record_name,
    signature_name,
)
from holdfast.journal.configs import find_conflict
from holdfast.store import PIECE_BYTES, Store, Writer

BLOCK = tarfile.BLOCKSIZE
MAX_OCTAL_SIZE = 8**11 - 1
CHECKSUM = slice(148, 156)
SIZE = slice(124, 136)
PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


# ---- packing


def pack(journal: Journal, commit: Commit, out: Writer) -> str:
    """Write a commit's checkpoint to ``out`` as a tar file; return the SHA-256 (hex) of the file.

    Raises:
        Damage: a file is missing or differs from its commit; the incomplete tar file is useless.
        WrongUse: the run's folder was renamed, so that nobody could unpack the tar file.
    """
    if renamed := journal.find_rename():
        raise WrongUse(
            f"{renamed}: it can't be packed", hint="copy a run into another store under its own name, as cp -r does, "
            "or pack the run itself; a run of another name can begin with its weights: init_from",
        )  # fmt: skip
    whole = hashlib.sha256()
    for piece in _tar_blocks(journal, commit):
        whole.update(piece)
        out.write(piece)
    return whole.hexdigest()


def _tar_blocks(journal: Journal, commit: Commit) -> Iterator[bytes]:
    run = journal.read_run().model_copy(update={"first_commit": commit.number, "packed": True})
    records = {"run.json": run.to_bytes()}
    config = config_name(commit.config_fingerprint)
    for name in (
        record_name("commits", commit.number),
        *filter(journal.store.exists, (config, signature_name(commit.number, commit.attempt))),
    ):
        records[name] = journal.store.read(name, 0, MAX_RECORD_BYTES)
    if config in records:
        _check_config(commit, records[config])
    files = {f"{commit.path}/{file.name}": file for file in commit.files}
    total = 2 * BLOCK
    for name in sorted(records.keys() | files.keys()):
        size_bytes = files[name].size_bytes if name in files else len(records[name])
        yield tar_header(f"{journal.run}/{name}", size_bytes)
        yield from _checked_pieces(journal.store, name, files[name]) if name in files else [records[name]]
        yield bytes(_padding(size_bytes))
        total += BLOCK + size_bytes + _padding(size_bytes)
    yield bytes(2 * BLOCK + -total % tarfile.RECORDSIZE)


def tar_header(name: str, size_bytes: int) -> bytes:
    """Return a file's header block in the POSIX ustar format, which has room for names of up to 255 bytes.

    The format has no room for a size of 8 GiB or more. Such a size is written in GNU's binary form, which the common
    tar programs read.
    """
    info = tarfile.TarInfo(name)
    info.size = min(size_bytes, MAX_OCTAL_SIZE)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if size_bytes > MAX_OCTAL_SIZE:
        block[SIZE] = b"\x80" + size_bytes.to_bytes(11, "big")
        block[CHECKSUM] = b" " * 8
        block[CHECKSUM] = b"%06o\0 " % sum(block)
    return bytes(block)


def _checked_pieces(store: Store, name: str, file: FileRecord) -> Iterator[bytes]:
    digest = hashlib.sha256()
    try:
        for piece in store.pieces(name):
            digest.update(piece)
            yield piece
    except NameMissing:
        raise Damage(f"{name} is missing but was committed with the SHA-256 {file.sha256}") from None
    _check_sha256(name, file, digest.hexdigest())


def _padding(size_bytes: int) -> int:
    return -size_bytes % BLOCK


def _check_sha256(name: str, file: FileRecord, found: str) -> None:
    if found != file.sha256:
        raise Damage(f"{name} has the SHA-256 {found} but was committed with {file.sha256}")


def _check_config(commit: Commit, data: bytes) -> None:
    record = ConfigRecord.from_bytes(data, config_name(commit.config_fingerprint))
    if record.fingerprint != commit.config_fingerprint:
        raise Damage(
            f"{config_name(commit.config_fingerprint)} contains settings with a different fingerprint, "
            f"{record.fingerprint}"
        )
    if conflict := find_conflict(record):
        raise Damage(f"{config_name(commit.config_fingerprint)}: {conflict}")


# ---- unpacking


def unpack(tar: BinaryIO, store: Store) -> Journal:
    """Unpack a tar file into a new run with one commit, under the packed run's name, and verify the files.

    If an error is raised, all files that this call wrote are deleted.

    Raises:
        Damage: the file is not a packed checkpoint, or a byte of it was changed.
        WrongUse: the store has a folder of this name, or a later version of Holdfast packed the file.
    """
    run, name, size_bytes = _read_header(tar)
    if not re.fullmatch(r"commits/[0-9]{8}\.json", name):
        raise Damage(
            f"the file is not a packed checkpoint: expected a commit as its first entry, found {name or 'nothing'}"
        )
    journal = Journal(store, run)
    for kind, is_there in (("file", store.exists(run)), ("folder", bool(journal.store.list()))):
        if is_there:
            raise WrongUse(
                f"the store {store.url} already has a {kind} {run}", hint="unpack the file into another store"
            )
    record = _read(tar, name, size_bytes)
    commit = Commit.from_bytes(record, name)
    if record_name("commits", commit.number) != name:
        raise Damage(f"{name} contains the record of a different commit, {commit.number}")
    made: list[str] = []
    try:
        records = _copy_all(tar, journal, commit, made) | {name: record}
        # write run.json last, because it makes the folder a run
        for each in sorted(records, key=lambda each: each == "run.json"):
            journal.place.create(each, records[each])
            made.append(each)
        journal.read_run()
    except BaseException:
        _undo(store, journal, commit.path, made)
        raise
    return journal


def _undo(store: Store, journal: Journal, path: str, made: list[str]) -> None:
    """Delete only the files that `unpack` made, because a second process may have begun the same run.

    Args:
        path: the checkpoint's folder. If a commit of the other process names this folder, the files in it stay, because
            the other process's run needs them.
    """
    taken, doomed = folder_record_name(path), list(made)
    if any(name.startswith(f"{path}/") for name in made):
        try:
            journal.store.create(taken, FolderRecord(path=path, commit=0, created_at=now()).to_bytes())
            doomed.append(taken)
        except NameTaken:
            doomed = [name for name in made if not name.startswith(f"{path}/")]
    for name in doomed:
        journal.store.delete(name)
    folders = [name for name in journal.store.list() if not journal.store.exists(name)]
    for folder in folders:
        if not journal.store.list(folder):
            journal.store.delete_folder(folder)
    if not journal.store.list():
        store.delete_folder(journal.run)


def _copy_all(tar: BinaryIO, journal: Journal, commit: Commit, made: list[str]) -> dict[str, bytes]:
    """Copy the checkpoint's files to the store, and verify them. Return the bytes of all other files, by name.

    Args:
        made: a list to which the name of each copied file is added.
    """
    files = {f"{commit.path}/{file.name}": file for file in commit.files}
    try:
        find_parts(commit)
    except CheckpointDamaged as error:
        raise Damage(str(error)) from None
    optional = {config_name(commit.config_fingerprint), signature_name(commit.number, commit.attempt)}
    records: dict[str, bytes] = {}
    waiting = files.keys() | optional | {"run.json"}
    while not _is_at_end(header := _read_header(tar)):
        run, name, size_bytes = header
        if run != journal.run or name not in waiting:
            raise Damage(f"the packed file has an unexpected entry, or has it twice: {run}/{name}")
        waiting.remove(name)
        if name in files:
            _copy(tar, journal.place, name, size_bytes, files[name])
            made.append(name)
        else:
            records[name] = _read(tar, name, size_bytes)
    missing = sorted(waiting - optional)
    if missing:
        raise Damage(f"the packed checkpoint lacks the file {missing[0]}")
    begun = RunRecord.from_bytes(records["run.json"], "run.json")
    if (begun.run, begun.first_commit) != (journal.run, commit.number):
        raise Damage(f"the packed run.json doesn't say that run {journal.run!r} begins with commit {commit.number}")
    if config_name(commit.config_fingerprint) in records:
        _check_config(commit, records[config_name(commit.config_fingerprint)])
    return records


def _read_header(tar: BinaryIO) -> tuple[str, str, int]:
    """Return the next file's run, its name in the run, and its size; ("", "", 0) at the end of the tar file.

    Only the header is read. A link, a device or a file with an unusual name is refused before any byte of it is read.

    Raises:
        Damage: the header is damaged, or describes a file that a packed checkpoint can't contain.
    """
    block = tar.read(BLOCK)
    if block == bytes(BLOCK):
        return "", "", 0
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise Damage(f"the file is not a packed checkpoint: {error}") from None
    if info.type != tarfile.REGTYPE or info.linkname:
        raise Damage(f"{info.name!r} is a link, a device or the like: expected a plain file")
    name = re.fullmatch(rf"({PART})/((?:{PART}/)?{PART})", info.name)
    if name is None or info.size < 0:
        raise Damage(f"{info.name!r} is not a file of a run")
    return name[1], name[2], info.size


def _is_at_end(header: tuple[str, str, int]) -> bool:
    return not header[0]


def _read(tar: BinaryIO, name: str, size_bytes: int) -> bytes:
    if size_bytes > MAX_RECORD_BYTES:
        raise Damage(f"the packed record {name} has {size_bytes} bytes, but a record has at most {MAX_RECORD_BYTES}")
    return b"".join(_file_bytes(tar, name, size_bytes))


def _copy(tar: BinaryIO, folder: Store, name: str, size_bytes: int, file: FileRecord) -> None:
    if size_bytes != file.size_bytes:
        raise Damage(f"{name} has {size_bytes} bytes but was committed with {file.size_bytes}")
    digest = hashlib.sha256()
    with folder.creating(name) as writer:
        for piece in _file_bytes(tar, name, size_bytes):
            digest.update(piece)
            writer.write(piece)
        _check_sha256(name, file, digest.hexdigest())


def _file_bytes(tar: BinaryIO, name: str, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of the next file, then skip their padding."""
    left = size_bytes
    while left:
        piece = tar.read(min(left, PIECE_BYTES))
        if not piece:
            raise Damage(f"the packed file is cut short: it ends in {name}", hint="copy the file again")
        left -= len(piece)
        yield piece
    tar.read(_padding(size_bytes))
