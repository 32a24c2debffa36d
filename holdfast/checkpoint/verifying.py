"""A checkpoint's bytes: how they are named, written and hashed in one pass, verified while they are read.

Nothing here knows torch: a tensor is a name, a dtype, a shape and a buffer (`Tensor`). The file is a plain safetensors
file, so every reader of that format can open it. `FORMAT.md` beside this module is the promise.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import contextlib
import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import rfc8785

from holdfast import faults
from holdfast.errors import CheckpointDamaged, NameMissing, NameTaken, RecordDamaged
from holdfast.journal import Commit, FileRecord, Record
from holdfast.store import PIECE_BYTES, Bytes, Store, Writer

PAYLOAD = "checkpoint.safetensors"
METADATA = "metadata.json"
METRICS = "metrics.jsonl"
FILES = (PAYLOAD, METADATA, METRICS)

# safetensors writes several metadata keys in random order: one key, holding canonical JSON, keeps the bytes stable.
METADATA_KEY = "holdfast"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor's bytes, row-major and little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True)
class Payload:
    """What `PAYLOAD` holds: tensors by name, and everything that is not a tensor as one JSON value."""

    tensors: Mapping[str, Tensor]
    tree: Any


class Metadata(Record):
    """``metadata.json``: what a person or a program wants to know without reading the payload."""

    epoch: int
    created_at: str
    optimizer_steps_total: int
    optimizer_steps_epoch: int
    steps_per_epoch: int
    grad_accum: int
    avg_loss: float | None
    scheduler_type: str
    current_lrs: list[float]
    learning_rate_history: list[list[float]]
    learning_rate_history_len: int
    metrics: dict[str, float | None]
    model_params: int
    checkpoint_sha256: str
    checkpoint_size_bytes: int
    previous_checkpoint_sha256: str
    config_fingerprint: str


class Saved(Record):
    """A complete, durable checkpoint that no commit names yet."""

    path: str
    files: list[FileRecord]
    metadata: Metadata

    @property
    def step(self) -> int:
        return self.metadata.optimizer_steps_total


@dataclass(frozen=True)
class FileDamage:
    """How one file of a checkpoint differs from its commit."""

    path: str
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}/{self.name} is {self.found} but was committed as {self.expected}"


# ---- names


def folder_name(step: int, steps_per_epoch: int) -> str:
    """``epoch-0004`` at the end of epoch 4; ``epoch-0005-step-00000420`` inside epoch 5."""
    epochs, within = divmod(step, steps_per_epoch)
    return f"epoch-{epochs + 1:04d}-step-{step:08d}" if within else f"epoch-{epochs:04d}"


def is_folder_name(name: str) -> bool:
    """Whether a name in a run's folder is a checkpoint's."""
    return name.startswith("epoch-")


# ---- writing


def save(run: Store, payload: Payload, metadata: dict[str, Any], metrics: str) -> Saved:
    """A complete checkpoint is on the store, durable, and its hashes are known without reading it back.

    The order is payload, metrics, metadata: a folder that has ``metadata.json`` is complete. Nothing that exists is
    overwritten: what a dead attempt left in the folder is used if it is the same to the byte; otherwise (another
    writer's checkpoint, or a damaged one) the next free name is taken.

    Args:
        run: the run's folder.
        metadata: all fields of `Metadata` but those about the payload's bytes.
        metrics: one line of JSON a step.
    """
    natural = folder_name(metadata["optimizer_steps_total"], metadata["steps_per_epoch"])
    for path in _names_from(natural):
        try:
            record = _write_payload(run, path, payload)
            files = [record, _write_file(run, path, METRICS, metrics.encode())]
            complete = Metadata(**metadata, checkpoint_sha256=record.sha256, checkpoint_size_bytes=record.size_bytes)
            files.append(_write_file(run, path, METADATA, complete.to_bytes()))
            faults.reach("metadata-durable")
            return Saved(path=path, files=files, metadata=complete)
        except NameTaken:
            continue
    raise AssertionError("there is always a next name")


def _names_from(natural: str) -> Iterator[str]:
    yield natural
    number = 2
    while True:
        yield f"{natural}.{number}"
        number += 1


def _write_payload(run: Store, path: str, payload: Payload) -> FileRecord:
    name = f"{path}/{PAYLOAD}"
    with _same_or_taken(run, path) as written, run.creating(name) as writer:
        hashing = _HashingWriter(writer)
        for piece in serialize(payload):
            hashing.write(piece)
        written.append(hashing.record(PAYLOAD))
        faults.reach("payload-written")
    faults.reach("payload-durable")
    return written[0]


def _write_file(run: Store, path: str, name: str, data: bytes) -> FileRecord:
    with _same_or_taken(run, path) as written:
        written.append(FileRecord(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        run.create(f"{path}/{name}", data)
    return written[0]


@contextlib.contextmanager
def _same_or_taken(run: Store, path: str) -> Iterator[list[FileRecord]]:
    """Let `NameTaken` pass if what has the name is, to the byte, what the block says that it wrote."""
    written: list[FileRecord] = []
    try:
        yield written
    except NameTaken as taken:
        try:
            there = hash_file(run, path, written[0].name)
        except NameMissing:  # the remains of an upload that never ended hold the name, on some object stores
            raise taken from None
        if there != written[0]:
            raise


class _HashingWriter:
    """Hashes what it passes on, so that nothing has to be read back."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._hash.update(piece)
            self._writer.write(piece)
        self._size_bytes += len(view)

    def record(self, name: str) -> FileRecord:
        return FileRecord(name=name, size_bytes=self._size_bytes, sha256=self._hash.hexdigest())


def serialize(payload: Payload) -> Iterator[Bytes]:
    """The bytes of a safetensors file, in pieces. The same payload gives the same bytes, everywhere.

    Tensors lie in order of falling item size, then of name, so that each is aligned for its dtype.
    """
    order = sorted(payload.tensors, key=lambda name: (-ITEM_BYTES[payload.tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: rfc8785.dumps(payload.tree).decode()}}
    end = 0
    for name in order:
        tensor = payload.tensors[name]
        start, end = end, end + len(memoryview(tensor.data))
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield payload.tensors[name].data


# ---- reading


def read_metadata(run: Store, path: str) -> Metadata | None:
    """A checkpoint's metadata; None where there is none, which means that it was never completed.

    Raises:
        RecordDamaged: it can't be read.
    """
    try:
        return Metadata.from_bytes(run.read(f"{path}/{METADATA}"), f"{path}/{METADATA}")
    except NameMissing:
        return None


def read_payload(run: Store, commit: Commit) -> Payload:
    """The committed state, verified while it was read: these bytes hash to what the commit says.

    The tensors share one buffer, which nothing else refers to.

    Raises:
        CheckpointDamaged: a file is missing or differs; ``data["files"]`` says how.
    """
    others = [file for file in commit.files if file.name != PAYLOAD]
    damaged = [damage for file in others for damage in verify_file(run, commit.path, file)]
    if damaged:
        raise _damage(commit, damaged)
    file = next((file for file in commit.files if file.name == PAYLOAD), None)
    if file is None:
        raise CheckpointDamaged(f"commit {commit.number} names no {PAYLOAD}")
    damaged = list(_size_damage(run, commit.path, file))
    if damaged:
        raise _damage(commit, damaged)
    buffer = bytearray(file.size_bytes)
    view = memoryview(buffer)
    position = 0
    digest = hashlib.sha256()
    for piece in run.pieces(f"{commit.path}/{PAYLOAD}"):
        digest.update(piece)
        view[position : position + len(piece)] = piece
        position += len(piece)
    if digest.hexdigest() != file.sha256:
        raise _damage(commit, [FileDamage(commit.path, PAYLOAD, file.sha256, digest.hexdigest())])
    return deserialize(buffer)


def deserialize(buffer: bytearray) -> Payload:
    """What `serialize` wrote. The tensors are views of the buffer.

    Raises:
        CheckpointDamaged: it is not a well-formed safetensors file of ours.
    """
    view = memoryview(buffer)
    try:
        (header_bytes,) = struct.unpack_from("<Q", buffer)
        if header_bytes > min(MAX_HEADER_BYTES, len(buffer) - 8):
            raise ValueError(f"its header claims {header_bytes} bytes")
        header = json.loads(bytes(view[8 : 8 + header_bytes]))
        tree = json.loads(header.pop("__metadata__")[METADATA_KEY])
        body = view[8 + header_bytes :]
        tensors = {name: _tensor(name, entry, body) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{PAYLOAD} is not a safetensors file of this format: {error}") from None
    return Payload(tensors, tree)


def _tensor(name: str, entry: dict[str, Any], body: memoryview) -> Tensor:
    start, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    size_bytes = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
    if not 0 <= start <= end <= len(body) or end - start != size_bytes:
        raise ValueError(f"{name} lies outside the file")
    return Tensor(entry["dtype"], shape, body[start:end])


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


def verify(run: Store, commit: Commit) -> list[FileDamage]:
    """Read every byte of a committed checkpoint back; what differs, file by file."""
    return [damage for file in commit.files for damage in verify_file(run, commit.path, file)]


def verify_file(run: Store, path: str, file: FileRecord) -> Iterator[FileDamage]:
    """How one file differs from its record, if it does."""
    damage = next(_size_damage(run, path, file), None)
    if damage is None:
        found = hash_file(run, path, file.name).sha256
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


def hash_file(run: Store, path: str, name: str) -> FileRecord:
    """One file as it is now."""
    digest = hashlib.sha256()
    size_bytes = 0
    for piece in run.pieces(f"{path}/{name}"):
        digest.update(piece)
        size_bytes += len(piece)
    return FileRecord(name=name, size_bytes=size_bytes, sha256=digest.hexdigest())


def find_orphans(run: Store, parent: str, config_fingerprint: str, committed: set[str]) -> Iterator[Saved]:
    """Complete checkpoints that were trained from ``parent`` and never committed, furthest first, verified.

    Args:
        parent: the content id that they must have been trained from; empty for the very beginning.
        committed: folders that a commit names already.
    """
    found = []
    for path in run.list():
        if not is_folder_name(path) or path in committed:
            continue
        try:
            metadata = read_metadata(run, path)
        except RecordDamaged:
            continue
        if (
            metadata is not None
            and metadata.previous_checkpoint_sha256 == parent
            and metadata.config_fingerprint == config_fingerprint
        ):
            found.append((metadata.optimizer_steps_total, path, metadata))
    for _, path, metadata in sorted(found, key=lambda entry: entry[:2], reverse=True):
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
