"""The files of a checkpoint, written several at once. Those that didn't change are copied by the store."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from holdfast import faults
from holdfast.checkpoint.files import check_same, write_file
from holdfast.checkpoint.format import is_part
from holdfast.checkpoint.metadata import METADATA, METRICS, Metadata, Saved, content_id, folder_name
from holdfast.errors import NameMissing, NameTaken
from holdfast.journal import FileRecord
from holdfast.store import Store

# A write is cut into pieces, so that what shares the process has its turn, and so that no system call is too long.
WRITE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Written:
    """A part, as it is in the last checkpoint.

    Attributes:
        path: the folder that it is in.
        sharing: how many checkpoints have this very file.
        is_lasting: it was the same in the checkpoint before.
    """

    record: FileRecord
    path: str
    sharing: int
    is_lasting: bool


@dataclass
class File:
    """A part of the payload: its bytes, their hash, as soon as it is known, and what it was the last time."""

    name: str
    image: memoryview
    record: "Future[FileRecord]"
    last: Written | None
    shared_by: int
    is_copied: bool = False

    def may_be_copied(self) -> bool:
        """Whether to wait for the hash, since it will probably be what it was; otherwise there is no time to lose."""
        return self.last is not None and self.last.is_lasting and self.last.sharing < self.shared_by

    def written(self, path: str) -> Written:
        """As it is now, in this folder."""
        record, last = self.record.result(), self.last
        sharing = last.sharing + 1 if last and self.is_copied else 1
        return Written(record, path, sharing, is_lasting=last is not None and last.record == record)


def write_checkpoint(
    run: Store, parts: Sequence[File], metadata: dict[str, Any], metrics: str, pool: ThreadPoolExecutor
) -> Saved:
    """All files of a checkpoint are on the store, durable; see `Saver.begin`."""
    natural = folder_name(metadata["optimizer_steps_total"], metadata["steps_per_epoch"])
    for path in _names_from(natural):
        if {name for name in run.list(path) if is_part(name)} - {part.name for part in parts}:
            continue  # a dead attempt has cut it otherwise
        try:
            noted = _write_but_metadata(run, path, parts, metrics.encode(), pool)
            faults.reach("payload-durable")
            records = [part.record.result() for part in parts]
            complete = Metadata(
                **metadata,
                writer=secrets.token_hex(16),
                parts=records,
                checkpoint_sha256=content_id(records),
                checkpoint_size_bytes=sum(record.size_bytes for record in records),
            )
            described = write_file(run, path, METADATA, complete.to_bytes())
            faults.reach("metadata-durable")
            return Saved(path=path, files=[*records, noted, described], metadata=complete)
        except NameTaken:
            continue
    raise AssertionError("there is always a next name")


def _write_but_metadata(
    run: Store, path: str, parts: Sequence[File], metrics: bytes, pool: ThreadPoolExecutor
) -> FileRecord:
    """The parts and the metrics are on the store, durable; the metrics' record."""
    # At once, but the first part has its name before the others have theirs: of two writers one has the folder.
    first = pool.submit(_write_part, run, path, parts[0], lambda: None)
    others = [pool.submit(_write_part, run, path, part, first.result) for part in parts[1:]]
    try:
        first.result()
        noted = write_file(run, path, METRICS, metrics)
        for each in others:
            each.result()
    finally:
        for each in others:  # that have not begun, if one has failed
            each.cancel()
        wait(others)  # what is left of them is not to meddle with what is written under the next name
    return noted


def _write_part(run: Store, path: str, part: File, may_be_named: Callable[[], object]) -> None:
    """The part is on the store; ``may_be_named`` returns when it may get its name, or raises."""
    try:
        if part.may_be_copied():
            may_be_named()
            part.is_copied = _copy_part(run, path, part)
            if part.is_copied:
                return
        with run.creating(f"{path}/{part.name}") as writer:
            for start in range(0, len(part.image), WRITE_BYTES):
                writer.write(part.image[start : start + WRITE_BYTES])
            faults.reach("payload-written")
            may_be_named()
    except NameTaken as taken:  # as soon as the storage knows: perhaps before a byte was written
        check_same(run, path, part.record.result(), taken)


def _copy_part(run: Store, path: str, part: File) -> bool:
    """Whether it is what it was in the last checkpoint, and was copied from there."""
    last = part.last
    if last is None or part.record.result() != last.record:
        return False
    try:
        return run.copy(f"{last.path}/{part.name}", f"{path}/{part.name}")
    except NameMissing:  # given up meanwhile
        return False


def _names_from(natural: str) -> Iterator[str]:
    yield natural
    number = 2
    while True:
        yield f"{natural}.{number}"
        number += 1
