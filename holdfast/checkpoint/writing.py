"""Writing a checkpoint's files, several at once. The store copies unchanged files from the last checkpoint."""

import functools
import itertools
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from holdfast.checkpoint.files import check_same_file, write_file
from holdfast.checkpoint.format import is_part
from holdfast.checkpoint.metadata import METADATA, SHOWN, Metadata, Saved, content_id, folder_name
from holdfast.checkpoint.parts import File, Writing
from holdfast.checkpoint.peers import Alone, Peers
from holdfast.errors import NameMissing, NameTaken
from holdfast.journal import FileRecord, folder_record_name
from holdfast.machine import faults
from holdfast.store import Store

# The number of parts that are written at the same time. Several are faster, because a disk has a queue and an object
# store serves several connections.
WRITERS = 4
# A part is written in pieces of this size, so that other threads can run in between and no system call takes long.
WRITE_BYTES = 16 * 2**20


def write_checkpoint(
    folder: Store, writing: Writing, names: Sequence[str], metadata: dict[str, Any], peers: Peers | Alone
) -> Saved:
    """Write all files of a checkpoint durably, and return the saved checkpoint; see `Saver.begin`.

    Args:
        names: the names of all parts.
        peers: the ranks that write the checkpoint together. When all of them have written their parts durably, the main
            rank completes the checkpoint.
    """
    free = list_free(folder, folder_name(metadata["optimizer_steps_total"], metadata["steps_per_epoch"]), names)
    while True:
        path = peers.decide(lambda: next(free))
        written: list[FileRecord] = []

        def write(path: str = path, written: list[FileRecord] = written) -> list[FileRecord]:
            written += writing.write(path)
            faults.reach("payload-durable")
            return [file.record.result() for file in writing.files]

        try:
            records = sorted(itertools.chain(*peers.each(write)), key=lambda record: record.name)
            return peers.decide(functools.partial(_complete, folder, path, records, written, metadata))
        except NameTaken:
            continue


def list_free(folder: Store, natural: str, names: Collection[str]) -> Iterator[str]:
    """Yield names of free folders for a checkpoint, best first.

    A folder is free even if an earlier save of the same state has left some of the checkpoint's files in it.

    Args:
        natural: the best name, which `folder_name` returns.
        names: the names of all parts.
    """

    def is_free(path: str) -> bool:
        # A prune that was suspended may still delete a folder that belonged to a commit, so skip such a folder.
        if folder.exists(folder_record_name(path)):
            return False
        # Skip a folder with parts of other names: a dead attempt wrote them from a state that was cut differently.
        return not {*filter(is_part, folder.list(path))} - {*names}

    return filter(is_free, _candidate_names(natural))


def _complete(
    folder: Store, path: str, parts: list[FileRecord], others: list[FileRecord], metadata: dict[str, Any]
) -> Saved:
    """Write ``metadata.json``, which makes a checkpoint complete. Return the checkpoint.

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


class Images:
    """The files of a checkpoint that one rank writes alone, with all parts in memory.

    Args:
        files: all parts.
        images: the bytes of each part, by name.
        lines: the files of JSON lines beside the state, by name.
        writing: the threads that write the parts.
    """

    def __init__(
        self,
        folder: Store,
        files: Sequence[File],
        images: Mapping[str, memoryview],
        lines: Mapping[str, bytes],
        writing: ThreadPoolExecutor,
    ) -> None:
        self.files = files
        self._folder, self._images, self._lines, self._pool = folder, images, lines, writing

    def write(self, path: str) -> list[FileRecord]:
        """Write the files, all parts at once; see `Writing.write`."""
        is_named: Future[None] = Future()
        first, *others = (
            self._pool.submit(self._write_part, path, file, is_named.result if number else lambda: None)
            for number, file in enumerate(self.files)
        )
        try:
            first.result()
            is_named.set_result(None)
            written = [write_file(self._folder, path, name, data) for name, data in self._lines.items()]
            for each in others:
                each.result()
        finally:
            end_writing(path, is_named, others)
        return written

    def _write_part(self, path: str, file: File, may_be_named: Callable[[], object]) -> None:
        """Write or copy a part; see `write_part` for ``may_be_named``."""
        image = self._images[file.name]
        pieces = (image[start : start + WRITE_BYTES] for start in range(0, len(image), WRITE_BYTES))
        try:
            if file.may_be_copied():
                may_be_named()
                file.is_copied = copy_part(self._folder, path, file)
                if file.is_copied:
                    return
            write_part(self._folder, path, file.name, pieces, may_be_named)
        except NameTaken as taken:  # some stores raise the error before a byte is written
            check_same_file(self._folder, path, file.record.result(), taken)


def write_part(
    folder: Store, path: str, name: str, pieces: Iterable[memoryview], may_be_named: Callable[[], object]
) -> None:
    """Write a part from its pieces.

    Args:
        may_be_named: a function that waits until the part may be renamed to its final name, and raises an error if that
            is refused.
    """
    with folder.creating(f"{path}/{name}") as writer:
        for piece in pieces:
            writer.write(piece)
        faults.reach("payload-written")
        may_be_named()


def end_writing(path: str, is_named: "Future[None]", parts: Sequence["Future[Any]"]) -> None:
    """Wait for the threads that write parts, so that no thread runs when the caller tries the next folder name.

    Args:
        is_named: a future that is done when the first part's file has its final name. If it isn't done, the files of
            the remaining parts keep their temporary names.
    """
    if not is_named.done():
        is_named.set_exception(NameTaken(f"{path}: the first part wasn't written, so no other part gets its name"))
    for each in parts:  # if one write failed, cancel the writes that have not started yet
        each.cancel()
    wait(parts)


def copy_part(folder: Store, path: str, file: File) -> bool:
    """Copy a part from the last checkpoint on the store if the part is unchanged. Return whether it was copied."""
    last = file.last
    if last is None or file.record.result() != last.record:
        return False
    try:
        return folder.copy(f"{last.path}/{file.name}", f"{path}/{file.name}")
    except NameMissing:  # the last checkpoint was deleted meanwhile
        return False


def _candidate_names(natural: str) -> Iterator[str]:
    yield natural
    number = 2
    while True:
        yield f"{natural}.{number}"
        number += 1
