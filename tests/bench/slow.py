"""A store as slow as a bucket: a folder whose every request takes a time, and whose bytes have a rate.

``tests.bench.slow:Slow://folder`` names one, if HOLDFAST_ALLOWED_STORES allows ``tests.bench.slow:Slow://``. A process
shares the rate among its threads, as it shares a network.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime

from holdfast.store import Bytes, Store, Writer
from holdfast.store.local import LocalStore

SCHEME = "tests.bench.slow:Slow://"
LATENCY_S = 0.05
# The bytes a second of a process's line, for all of its threads.
RATE_VARIABLE = "BENCH_STORE_RATE"
# A request for a long file is cut, so that several threads get their share.
PIECE_BYTES = 2**20

_line = threading.Lock()
_free_at = 0.0


def ask(size_bytes: int = 0) -> None:
    """Wait as long as a request takes that sends or gets some bytes."""
    global _free_at
    time.sleep(LATENCY_S)
    send(size_bytes)


def send(size_bytes: int) -> None:
    """Wait as long as some bytes take on the line of this process, behind those of its other threads."""
    global _free_at
    with _line:
        _free_at = max(_free_at, time.monotonic()) + size_bytes / float(os.environ[RATE_VARIABLE])
        until = _free_at
    time.sleep(max(0.0, until - time.monotonic()))


class Slow(Store):
    """A folder behind a slow line."""

    def __init__(self, url: str) -> None:
        self.url, self._store = url, LocalStore(url.removeprefix(SCHEME))

    def inside(self, folder: str) -> Store:
        return Slow(f"{self.url.rstrip('/')}/{folder}")

    def create(self, name: str, data: Bytes) -> None:
        ask(len(data))
        self._store.create(name, data)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        ask()
        with self._store.creating(name) as writer:
            yield _Writer(writer)

    def replace(self, name: str, data: Bytes) -> None:
        ask(len(data))
        self._store.replace(name, data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self._store.read(name, start, stop)
        ask(len(data))
        return data

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        ask()
        for piece in self._store.pieces(name, piece_bytes):
            send(len(piece))
            yield piece

    def size_bytes(self, name: str) -> int:
        ask()
        return self._store.size_bytes(name)

    def modified(self, name: str) -> datetime:
        ask()
        return self._store.modified(name)

    def list(self, folder: str = "", after: str = "") -> list[str]:
        ask()
        return self._store.list(folder, after)

    def delete(self, name: str) -> None:
        ask()
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        ask()
        self._store.delete_folder(folder)


class _Writer:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            send(len(piece))
            self._writer.write(piece)
