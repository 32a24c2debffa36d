"""The base class of the stores on object storage, which use fsspec file systems.

An object appears completely or not at all, so a plain write replaces an object atomically. A request that must not
replace an object has a precondition that the storage checks: ``If-None-Match: *`` or ``ifGenerationMatch=0``.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from holdfast.errors import NameMissing, NameTaken, StoreDenied
from holdfast.store.contract import PIECE_BYTES, TEMP_MARK, Bytes, Store, Writer, checked
from holdfast.store.failures import RETRY_WITHIN_S, retried, status_of
from holdfast.store.uploads import PART_BYTES, PartsWriter, Upload

T = TypeVar("T")


class ObjectStore(Store):
    """A prefix of a bucket. A subclass for each cloud adds the cloud's own calls.

    Attributes:
        part_bytes: files larger than this are uploaded in parts of this size.
        retry_within_s: seconds during which a failed request is repeated.
    """

    part_bytes = PART_BYTES
    retry_within_s = RETRY_WITHIN_S

    def __init__(self, url: str, fs: Any = None) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = (fs, fs._strip_protocol(self.url)) if fs else url_to_fs(self.url, **self._options())

    def inside(self, folder: str) -> "ObjectStore":
        return type(self)(f"{self.url}/{checked(folder)}", self._fs)

    def create(self, name: str, data: Bytes) -> None:
        path, data = self._path(name), bytes(data)
        if len(data) > self.part_bytes:  # the cloud's library would send parts, and may mix the parts of two writers
            with self.creating(name) as writer:
                writer.write(data)
            return
        try:
            self._ask(f"write {name}", lambda: self._fs.pipe_file(path, data, mode="create"))
        except NameTaken:
            # The cloud's library repeats a request by itself. So an earlier try of this write may have created the
            # object, and its response was lost.
            if self.read(name, 0, len(data) + 1) != data:
                raise

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        """Create an object from pieces. Memory holds at most `Upload.at_once` + 2 parts of the object at a time."""
        if self.exists(name):
            raise NameTaken(f"can't write {name} in {self.url}: it exists")  # refuse before any part is sent
        with PartsWriter(
            put=functools.partial(self.create, name),
            begin=lambda: self._ask(f"write {name}", functools.partial(self._upload, self._path(name))),
            ask=functools.partial(self._ask, f"write {name}"),
            part_bytes=self.part_bytes,
        ) as writer:
            yield writer
            writer.complete()

    def replace(self, name: str, data: Bytes) -> None:
        self._ask(f"write {name}", lambda: self._fs.pipe_file(self._path(name), bytes(data)))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        path, bounds = self._path(name), {"start": start, "end": stop} if start or stop is not None else {}
        if stop is not None and stop <= start:
            self.size_bytes(name)
            return b""

        def read() -> bytes:
            try:
                return bytes(self._fs.cat_file(path, **bounds))
            except Exception as error:
                if bounds and _is_beyond_the_end(error):
                    return b""
                raise

        return self._ask(f"read {name}", read)

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        size_bytes = self.size_bytes(name)
        for start in range(0, size_bytes, piece_bytes):
            stop = min(start + piece_bytes, size_bytes)
            yield self._ask(f"read {name}", functools.partial(self._read_all, self._path(name), start, stop))

    def _read_all(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``. If the response is shorter, raise an error that leads to a retry.

        A server may send fewer bytes than requested. Without this check the checkpoint would seem damaged.
        """
        data = bytes(self._fs.cat_file(path, start=start, end=stop))
        if len(data) != stop - start:
            raise ConnectionError(f"the response has {len(data):,} bytes, not {stop - start:,}")
        return data

    def size_bytes(self, name: str) -> int:
        return self._look(name)[0]

    def modified(self, name: str) -> datetime:
        return self._look(name)[1].astimezone(UTC)

    def list(self, folder: str = "", after: str = "") -> list[str]:
        path = self._path(folder) if folder else self._root
        try:
            paths = self._ask(
                f"list {folder}", lambda: [*(self._list_after(path, after) if after else self._list(path))]
            )
        except NameMissing:
            return []
        names = {each.rstrip("/").rpartition("/")[2] for each in paths if each.strip("/") != path}
        return sorted(name for name in names if TEMP_MARK not in name and name > after)

    def delete(self, name: str) -> None:
        with contextlib.suppress(NameMissing):
            self._ask(f"delete {name}", lambda: self._fs.rm_file(self._path(name)))

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(NameMissing):
            self._ask(f"delete {folder}", lambda: self._fs.rm(self._path(folder), recursive=True))
        if left := self.list(folder):  # s3fs silently skips objects for whose deletion it lacks the right
            raise StoreDenied(
                f"can't delete {folder} in {self.url}: it still contains {left[0]}",
                hint="give this machine's identity the right to perform this action",
                lacks_right=True,
            )

    def _options(self) -> dict[str, Any]:
        # A cached listing would hide files that other machines write.
        return {"use_listings_cache": False}

    @abc.abstractmethod
    def _upload(self, path: str) -> Upload:
        """Begin an upload in parts."""

    def _list(self, path: str) -> Iterable[str]:
        """Return the paths in a folder."""
        names: Iterable[str] = self._fs.ls(path, detail=False)
        return names

    def _list_after(self, path: str, after: str) -> Iterable[str]:
        """Return the paths in a folder whose names sort after ``after``. The result may also contain earlier paths."""
        return self._list(path)

    def _split(self, path: str) -> tuple[str, str]:
        """Return the bucket and the key of a path."""
        bucket, key, *_ = self._fs.split_path(path)
        return bucket, key

    @abc.abstractmethod
    def _stat(self, path: str) -> tuple[int, datetime]:
        """Return an object's size in bytes and the time of its last write.

        This sends one request, where fsspec's `info` may send two.
        """

    def _look(self, name: str) -> tuple[int, datetime]:
        return self._ask(f"look at {name}", lambda: self._stat(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"

    def _ask(self, action: str, request: Callable[[], T]) -> T:
        return retried(request, f"{action} in {self.url}", self.retry_within_s)


def _is_beyond_the_end(error: Exception) -> bool:
    return status_of(error) == 416
