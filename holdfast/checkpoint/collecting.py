"""Writing a checkpoint of sharded ranks: collect the bytes of each part (file) from all ranks, hash and write them."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from holdfast.checkpoint.files import check_same_file, write_file
from holdfast.checkpoint.parts import File
from holdfast.checkpoint.peers import Peers, list_batches
from holdfast.checkpoint.streaming import ABREAST, MemoryWindows, Stream
from holdfast.checkpoint.writing import copy_part, end_writing, write_part
from holdfast.errors import NameTaken
from holdfast.journal import FileRecord
from holdfast.store import Store


class Exchanged(Protocol):
    """The exchange of the bytes of a checkpoint's parts, from the ranks that hold them to the ranks that own the parts.

    Attributes:
        owners: the rank that owns each part, by the part's name, in the order of the parts.
        sizes: the size of each part in bytes.
        window_bytes: the size of the windows in which a part is exchanged.
    """

    owners: Mapping[str, int]
    sizes: Mapping[str, int]
    window_bytes: int

    def stream(self, names: Sequence[str], copies: Mapping[str, memoryview], streams: Mapping[str, Stream]) -> None:
        """Send the bytes of some parts to the parts' owners, all parts at the same time. All ranks call it together.

        Args:
            copies: the copy of this rank's bytes of each part, by the part's name.
            streams: the streams that write the parts of which this rank is the owner, by the part's name.
        """


class Collected:
    """The files of a checkpoint that this rank writes, while the ranks exchange the files' bytes in windows.

    The thread that calls `write` exchanges windows with the other ranks; threads of a pool hash and write the windows.
    A rank that fails continues the exchange, because the other ranks wait for its bytes. It raises the error
    afterwards.

    Args:
        files: the parts that this rank owns.
        lines: the files of JSON lines beside the state, by name; the main rank writes them.
        pool: a thread pool of at least `ABREAST` threads.
        copies: a copy of the bytes that this rank has of each part, by the part's name.
        windows: memory for `WINDOWS` windows.
    """

    def __init__(
        self,
        folder: Store,
        files: Sequence[File],
        lines: Mapping[str, bytes],
        pool: ThreadPoolExecutor,
        peers: Peers,
        held: Exchanged,
        copies: Mapping[str, memoryview],
        windows: memoryview,
    ) -> None:
        self.files = files
        self._own = {file.name: file for file in files}
        self._folder, self._lines, self._pool, self._peers = folder, lines, pool, peers
        self._held, self._copies, self._memory = held, copies, windows
        self._unchanged: frozenset[str] | None = None

    def write(self, path: str) -> list[FileRecord]:
        """Write the files; see `Writing.write`. All ranks call it together."""
        unchanged = self._find_unchanged()
        windows = MemoryWindows(self._memory, self._held.window_bytes)
        is_named: Future[None] = Future()
        running: list[Future[Any]] = []

        def write(file: File, stream: Stream) -> None:
            is_first = file.name == next(iter(self._held.owners))
            self._write_part(path, file, stream, (lambda: None) if is_first else is_named.result)

        def collect(names: Sequence[str]) -> None:
            self._collect(names, windows, write, running)

        try:
            first, *others = self._list_batches(self._held.owners.keys() - unchanged)
            collect(first)
            self._peers.decide(lambda: running[0].result())
            is_named.set_result(None)
            running.append(lines := self._pool.submit(self._write_lines, path))
            for batch in others:
                collect(batch)
            for batch in self._list_batches(self._copy_parts(path, unchanged)):
                collect(batch)
            for each in running:
                each.result()
            return lines.result()
        finally:
            end_writing(path, is_named, running)

    def _collect(
        self,
        names: Sequence[str],
        windows: MemoryWindows,
        take: Callable[[File, Stream], None],
        running: "list[Future[Any]]",
    ) -> None:
        """Collect the bytes of some parts from all ranks. All ranks call it together.

        Args:
            take: consumes the bytes of one part from its stream; called in a thread for each of this rank's own parts.
            running: the list to which the started threads are added.
        """
        streams = {name: Stream(name, self._held.sizes[name], windows) for name in names if name in self._own}
        running += [self._pool.submit(take, self._own[name], stream) for name, stream in streams.items()]
        try:
            self._held.stream(names, self._copies, streams)
        except BaseException as error:
            for stream in streams.values():
                stream.fail(error)
            raise

    def _list_batches(self, names: Collection[str]) -> Iterator[list[str]]:
        return list_batches({name: owner for name, owner in self._held.owners.items() if name in names}, ABREAST)

    def _write_part(self, path: str, file: File, stream: Stream, may_be_named: Callable[[], object]) -> None:
        taken: NameTaken | None = None
        try:
            write_part(self._folder, path, file.name, stream.pieces, may_be_named)
        except NameTaken as error:
            taken = error
        finally:
            _note(file, stream.finish())  # after an error, too, take the remaining bytes, to free the windows
        if taken is not None:
            check_same_file(self._folder, path, file.record.result(), taken)

    def _write_lines(self, path: str) -> list[FileRecord]:
        lines = self._lines if self._peers.rank == 0 else {}
        return [write_file(self._folder, path, name, data) for name, data in lines.items()]

    def _find_unchanged(self) -> frozenset[str]:
        """Return the rarely changing parts that equal the last checkpoint's parts. All ranks call it together."""
        if self._unchanged is None:
            _, *others = self._held.owners  # the first part contains the run's progress, so it always changes
            lasting = self._agree(name for name in others if name in self._own and self._own[name].may_be_copied())
            windows = MemoryWindows(self._memory, self._held.window_bytes)
            running: list[Future[Any]] = []
            for batch in self._list_batches(lasting):
                self._collect(batch, windows, lambda file, stream: _note(file, stream.finish()), running)
            for each in running:
                each.result()
            own = [self._own[name] for name in lasting if name in self._own]
            unchanged = [file.name for file in own if file.last and file.last.record == file.record.result()]
            self._unchanged = frozenset(self._agree(unchanged) if lasting else ())
        return self._unchanged

    def _copy_parts(self, path: str, unchanged: Collection[str]) -> list[str]:
        """Copy unchanged parts from the last checkpoint on the store. Return the parts that the store can't copy."""
        if not unchanged:
            return []

        def copy() -> list[str]:
            for name in unchanged & self._own.keys():
                self._own[name].is_copied = self._copy_part(path, self._own[name])
            return [name for name in unchanged if name in self._own and not self._own[name].is_copied]

        return sorted(itertools.chain(*self._peers.each(copy)))

    def _copy_part(self, path: str, file: File) -> bool:
        try:
            return copy_part(self._folder, path, file)
        except NameTaken as taken:
            check_same_file(self._folder, path, file.record.result(), taken)
            return True

    def _agree(self, names: "Collection[str] | Iterator[str]") -> list[str]:
        """Return the union of the names that the ranks pass, sorted. All ranks call it together."""
        return sorted(itertools.chain(*self._peers.each(lambda: list(names))))


def _note(file: File, record: FileRecord) -> None:
    if not file.record.done():  # the hash is known already if an earlier folder name was tried
        file.record.set_result(record)
