"""Writing a checkpoint's files, several at once. The store copies unchanged files from the last checkpoint."""

import functools
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from holdfast import faults
from holdfast.checkpoint.files import check_same, write_file
from holdfast.checkpoint.format import is_part
from holdfast.checkpoint.metadata import METADATA, SHOWN, Metadata, Saved, content_id, folder_name
from holdfast.checkpoint.peers import Peers
from holdfast.errors import NameMissing, NameTaken
from holdfast.journal import FileRecord, folder_record_name
from holdfast.store import Store

# A part is written in pieces of this size, so that other threads get their turn and no system call takes long.
WRITE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Written:
    """A part of the last checkpoint.

    Attributes:
        path: the checkpoint's folder.
        sharing: the number of checkpoints that share this file.
        is_lasting: whether the part was the same in the checkpoint before.
    """

    record: FileRecord
    path: str
    sharing: int
    is_lasting: bool


@dataclass
class File:
    """A part that is being written: its bytes, its record (a future, until it is hashed), and its previous version."""

    name: str
    image: memoryview
    record: "Future[FileRecord]"
    last: Written | None
    shared_by: int
    is_copied: bool = False

    def may_be_copied(self) -> bool:
        """Return whether the store may copy the part. Copying waits for the hash, so the part must seldom change."""
        return self.last is not None and self.last.is_lasting and self.last.sharing < self.shared_by

    def written(self, path: str) -> Written:
        """Return the part as written to this folder."""
        record, last = self.record.result(), self.last
        sharing = last.sharing + 1 if last and self.is_copied else 1
        return Written(record, path, sharing, is_lasting=last is not None and last.record == record)


def write_checkpoint(
    folder: Store,
    parts: Sequence[File],
    names: Sequence[str],
    metadata: dict[str, Any],
    lines: Mapping[str, bytes],
    pool: ThreadPoolExecutor,
    peers: Peers,
) -> Saved:
    """Write all files of a checkpoint durably, and return the saved checkpoint; see `Saver.begin`.

    Args:
        parts: the parts that this rank owns; the main rank owns the first one.
        names: the names of all parts.
        lines: the files of JSON lines beside the state, by name; the main rank writes them.
        peers: the ranks that write the checkpoint together. Only when all have written their parts durably, the main
            rank completes it.
    """
    candidates = _candidate_names(folder_name(metadata["optimizer_steps_total"], metadata["steps_per_epoch"]))
    is_main = peers.rank == 0

    def is_free(path: str) -> bool:
        # A folder that was assigned to a commit may be deleted at any moment by a prune that has slept since.
        if folder.exists(folder_record_name(path)):
            return False
        # A dead attempt may have left parts of another cut in a folder.
        return not {*filter(is_part, folder.list(path))} - {*names}

    def choose() -> str:
        return next(filter(is_free, candidates))

    while True:
        path = peers.decide(choose)
        written: list[FileRecord] = []

        def write(path: str = path, written: list[FileRecord] = written) -> list[FileRecord]:
            written += _write_parts_and_lines(folder, path, parts, lines if is_main else {}, pool, peers)
            faults.reach("payload-durable")
            return [part.record.result() for part in parts]

        try:
            records = sorted(itertools.chain(*peers.each(write)), key=lambda record: record.name)
            return peers.decide(functools.partial(_complete, folder, path, records, written, metadata))
        except NameTaken:
            continue


def _complete(
    folder: Store, path: str, parts: list[FileRecord], others: list[FileRecord], metadata: dict[str, Any]
) -> Saved:
    """Write ``metadata.json``, which makes a checkpoint complete.

    Args:
        parts: the records of all parts.
        others: the records of the other files.
    """
    described = Metadata(
        **metadata,
        writer=secrets.token_hex(16),
        parts=parts,
        shown=next((file for file in others if file.name == SHOWN), None),
        checkpoint_sha256=content_id(parts),
        checkpoint_size_bytes=sum(part.size_bytes for part in parts),
    )
    record = write_file(folder, path, METADATA, described.to_bytes())
    faults.reach("metadata-durable")
    return Saved(path=path, files=[*parts, *others, record], metadata=described)


def _write_parts_and_lines(
    folder: Store,
    path: str,
    parts: Sequence[File],
    lines: Mapping[str, bytes],
    pool: ThreadPoolExecutor,
    peers: Peers,
) -> list[FileRecord]:
    """Write this rank's parts and the files of lines durably, and return the records of the latter."""
    # All are written at once, but the first part gets its name first: so one of two writers gets the folder.
    is_named: Future[None] = Future()
    firsts = [pool.submit(_write_part, folder, path, part, lambda: None) for part in parts[: peers.rank == 0]]
    others = [pool.submit(_write_part, folder, path, part, is_named.result) for part in parts[len(firsts) :]]
    try:
        peers.decide(lambda: [each.result() for each in firsts])
        is_named.set_result(None)
        written = [write_file(folder, path, name, data) for name, data in lines.items()]
        for each in others:
            each.result()
    finally:
        if not is_named.done():
            is_named.set_exception(NameTaken(f"{path} isn't this save's folder"))
        for each in others:  # if one failed, those that have not started yet
            each.cancel()
        wait(others)  # so that none of them is still running when the caller tries the next name
    return written


def _write_part(folder: Store, path: str, part: File, may_be_named: Callable[[], object]) -> None:
    """Write or copy a part. ``may_be_named`` waits until the part may get its name, and raises if it may not."""
    try:
        if part.may_be_copied():
            may_be_named()
            part.is_copied = _copy_part(folder, path, part)
            if part.is_copied:
                return
        with folder.creating(f"{path}/{part.name}") as writer:
            for start in range(0, len(part.image), WRITE_BYTES):
                writer.write(part.image[start : start + WRITE_BYTES])
            faults.reach("payload-written")
            may_be_named()
    except NameTaken as taken:  # raised when the store notices it, perhaps before a byte was written
        check_same(folder, path, part.record.result(), taken)


def _copy_part(folder: Store, path: str, part: File) -> bool:
    """Let the store copy a part from the last checkpoint if it is unchanged. Return whether it was copied."""
    last = part.last
    if last is None or part.record.result() != last.record:
        return False
    try:
        return folder.copy(f"{last.path}/{part.name}", f"{path}/{part.name}")
    except NameMissing:  # the last checkpoint was deleted meanwhile
        return False


def _candidate_names(natural: str) -> Iterator[str]:
    yield natural
    number = 2
    while True:
        yield f"{natural}.{number}"
        number += 1
