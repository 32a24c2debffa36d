"""A checkpoint on its way to the store: named, hashed while it is written, complete once its metadata is there."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import Field

from holdfast import faults
from holdfast.checkpoint.format import PAYLOAD, Payload, serialize
from holdfast.errors import NameMissing, NameTaken
from holdfast.journal import FOLDER, FileRecord, Record
from holdfast.probe import Probe
from holdfast.store import PIECE_BYTES, Bytes, Store

METADATA = "metadata.json"
METRICS = "metrics.jsonl"
FILES = (PAYLOAD, METADATA, METRICS)


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
    anneals: dict[str, float] = Field(default_factory=dict)
    anneal_offset: int = 0
    probe: Probe = Probe()
    replayed: dict[str, float] | None = None
    model_params: int
    checkpoint_sha256: str
    checkpoint_size_bytes: int
    previous_checkpoint_sha256: str
    config_fingerprint: str
    environment: dict[str, Any] = Field(
        default_factory=dict, description="what it was trained on, and the hashes of the recipe's code"
    )


class Saved(Record):
    """A complete, durable checkpoint that no commit names yet.

    Attributes:
        save_s: seconds that the save took; 0 where nobody knows.
    """

    path: str
    files: list[FileRecord]
    metadata: Metadata
    save_s: float = 0.0

    @property
    def step(self) -> int:
        return self.metadata.optimizer_steps_total


# ---- names


def folder_name(step: int, steps_per_epoch: int) -> str:
    """``epoch-0004`` at the end of epoch 4; ``epoch-0005-step-00000420`` inside epoch 5."""
    epochs, within = divmod(step, steps_per_epoch)
    return f"epoch-{epochs + 1:04d}-step-{step:08d}" if within else f"epoch-{epochs:04d}"


def is_folder_name(name: str) -> bool:
    """Whether a name in a run's folder is a checkpoint's."""
    return re.match(FOLDER, name) is not None


def step_of(name: str, steps_per_epoch: int) -> int:
    """The step that `folder_name` was given."""
    _, epoch, *step = name.partition(".")[0].split("-")
    return int(step[1]) if step else int(epoch) * steps_per_epoch


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
    digest = _Digest()
    try:
        with run.creating(f"{path}/{PAYLOAD}") as writer:
            for piece in _cut(payload):
                digest.add(piece)
                writer.write(piece)
            faults.reach("payload-written")
    except NameTaken as taken:  # as soon as the storage knows: perhaps before a byte was written
        digest = _Digest()
        for piece in _cut(payload):
            digest.add(piece)
        _check_same(run, path, digest.record(PAYLOAD), taken)
    faults.reach("payload-durable")
    return digest.record(PAYLOAD)


def _write_file(run: Store, path: str, name: str, data: bytes) -> FileRecord:
    record = FileRecord(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    try:
        run.create(f"{path}/{name}", data)
    except NameTaken as taken:
        _check_same(run, path, record, taken)
    return record


def _check_same(run: Store, path: str, record: FileRecord, taken: NameTaken) -> None:
    """Return if what has the name is, to the byte, what was to be written; otherwise raise ``taken``."""
    try:
        there = hash_file(run, path, record.name)
    except NameMissing:  # the remains of an upload that never ended hold the name, on some object stores
        raise taken from None
    if there != record:
        raise taken


def _cut(payload: Payload) -> Iterator[memoryview]:
    """The payload's bytes, in pieces that a processor's cache holds."""
    for part in serialize(payload):
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


class _Digest:
    """SHA-256 and size of what is passed by, so that nothing has to be read back."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def add(self, data: Bytes) -> None:
        self._hash.update(data)
        self._size_bytes += len(data)

    def record(self, name: str) -> FileRecord:
        return FileRecord(name=name, size_bytes=self._size_bytes, sha256=self._hash.hexdigest())


def hash_file(run: Store, path: str, name: str, watch: Callable[[int], None] = lambda size_bytes: None) -> FileRecord:
    """One file as it is now.

    Args:
        watch: called with the size of each piece that was read.
    """
    digest = _Digest()
    for piece in run.pieces(f"{path}/{name}"):
        digest.add(piece)
        watch(len(piece))
    return digest.record(name)
