"""Uploads of large files in parts: several parts are sent in parallel, and memory stays bounded."""

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
# Clouds allow at least 10 000 parts. The parts' size grows by `PART_BYTES` after each thousand parts, so a file can
# have 800 GiB.
GROW_EVERY = 1000
AT_ONCE = 4
# The key in an object's metadata under which the upload stores its random token. Azure allows no hyphen in a key.
WRITER = "holdfast_writer"

Ask = Callable[[Callable[[], Any]], Any]


class Upload(Protocol):
    """An upload in parts. The file appears only when `complete` is called.

    Attributes:
        at_once: the number of parts that may be sent in parallel.
    """

    at_once: int

    def part(self, number: int, data: bytes) -> None:
        """Send a part; parts are numbered from 1."""

    def complete(self) -> None:
        """Create the file from the uploaded parts, unless the name exists."""

    def has_won(self) -> bool:
        """Return whether this upload has created the file with this name."""

    def abort(self) -> None:
        """Delete the uploaded parts."""


def complete(upload: Upload, ask: Ask) -> None:
    """Complete an upload. Also succeed if an earlier try completed the upload and the response was lost.

    Args:
        ask: runs a request, and repeats it after a transient failure.
    """
    try:
        ask(upload.complete)
    except StoreError:
        with contextlib.suppress(StoreError):  # raise the first error, which is more useful
            if ask(upload.has_won):
                return
        raise


class PartsWriter:
    """A writer that uploads a file in parts, or in one piece if it is smaller than a part.

    If the ``with`` block ends without a call of `complete`, the parts are deleted.
    """

    def __init__(
        self,
        put: Callable[[bytes], None],
        begin: Callable[[], Upload],
        ask: Ask,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Make the writer. Nothing is sent before the first `write`.

        Args:
            put: creates the file in one piece.
            begin: begins an upload in parts.
            ask: runs a request of the upload, and repeats it after a transient failure.
            part_bytes: the size of each of the first thousand parts.
        """
        self._put, self._begin, self._ask, self._part_bytes = put, begin, ask, part_bytes
        self._upload: Upload | None = None
        self._buffer = io.BytesIO()
        self._parts = 0
        self._running: deque[Future[None]] = deque()
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def write(self, data: Bytes) -> None:
        """Append bytes. Wait while too many parts are being sent. Raise the error of an earlier part, if any failed."""
        rest = memoryview(data).cast("B")
        while rest:
            part_bytes = self._part_bytes * (1 + self._parts // GROW_EVERY)
            rest = rest[self._buffer.write(rest[: part_bytes - self._buffer.tell()]) :]
            if self._buffer.tell() == part_bytes:
                self._send()

    def complete(self) -> None:
        """Send the bytes that `write` hasn't sent yet, and create the file."""
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
            with contextlib.suppress(Exception):  # raise the block's own error; `sweep` deletes the remains later
                self._upload.abort()

    def _send(self) -> None:
        self._upload = self._upload or self._begin()
        if len(self._running) == self._upload.at_once:
            self._running.popleft().result()
        self._parts += 1
        part = functools.partial(self._upload.part, self._parts, self._buffer.getvalue())
        self._running.append(self._pool.submit(self._ask, part))
        self._buffer = io.BytesIO()
