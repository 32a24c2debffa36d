"""One file of many parts: some of them are on their way while the next is written, and memory stays bounded."""

import contextlib
import functools
import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

from holdfast.errors import StoreError
from holdfast.store.contract import Bytes

PART_BYTES = 16 * 2**20
# Clouds take 10 000 parts or more: after each thousand, parts grow by the first size, and a file may have 800 GiB.
GROW_EVERY = 1000
AT_ONCE = 4
# The key of an object's metadata that holds the token of the upload which made it. Azure allows no hyphen.
WRITER = "holdfast_writer"

Ask = Callable[[Callable[[], Any]], Any]


class Upload(Protocol):
    """A file that doesn't exist before all its parts are there.

    Attributes:
        at_once: how many parts may be sent at the same time.
    """

    at_once: int

    def part(self, number: int, data: bytes) -> None:
        """Send a part; they are numbered from 1."""

    def complete(self) -> None:
        """Make the file of its parts, unless its name exists."""

    def has_won(self) -> bool:
        """Return whether the name has the file of this very upload."""

    def abort(self) -> None:
        """Make the parts be gone."""


def complete(upload: Upload, ask: Ask) -> None:
    """Complete an upload, also where the answer to a try that did it was lost.

    Args:
        ask: does a request, again if need be.
    """
    try:
        ask(upload.complete)
    except StoreError:
        with contextlib.suppress(StoreError):  # the first error says more
            if ask(upload.has_won):
                return
        raise


class PartsWriter:
    """Sends what is written in parts; in one piece, if it is less than a part.

    Nothing is left of it when its block ends without `complete`.
    """

    def __init__(
        self,
        put: Callable[[bytes], None],
        begin: Callable[[], Upload],
        ask: Ask,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """
        Args:
            put: creates the file in one piece.
            begin: begins to create it in parts.
            ask: does a request of an upload, again if need be.
            part_bytes: the size of the first parts.
        """
        self._put, self._begin, self._ask, self._part_bytes = put, begin, ask, part_bytes
        self._upload: Upload | None = None
        self._buffer = io.BytesIO()
        self._parts = 0
        self._running: deque[Future[None]] = deque()
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def write(self, data: Bytes) -> None:
        """Waits for room in memory. Raises what any part before has failed with."""
        rest = memoryview(data).cast("B")
        while rest:
            part_bytes = self._part_bytes * (1 + self._parts // GROW_EVERY)
            rest = rest[self._buffer.write(rest[: part_bytes - self._buffer.tell()]) :]
            if self._buffer.tell() == part_bytes:
                self._send()

    def complete(self) -> None:
        """The file is there."""
        if self._upload is None:
            self._put(self._buffer.getvalue())
            return
        if self._buffer.tell():
            self._send()
        while self._running:
            self._running.popleft().result()
        complete(self._upload, self._ask)
        self._upload = None

    def __enter__(self) -> "PartsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._upload:
            with contextlib.suppress(Exception):  # what ended the block is what matters; remains are swept
                self._upload.abort()

    def _send(self) -> None:
        self._upload = self._upload or self._begin()
        if len(self._running) == self._upload.at_once:
            self._running.popleft().result()
        self._parts += 1
        part = functools.partial(self._upload.part, self._parts, self._buffer.getvalue())
        self._running.append(self._pool.submit(self._ask, part))
        self._buffer = io.BytesIO()
