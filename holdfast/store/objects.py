"""S3 and Azure Blob Storage, through their fsspec file systems.

An object appears whole or not at all, so a plain write replaces atomically. Create-once is a precondition that the
storage itself checks, ``If-None-Match: *``.
"""

import contextlib
import errno
import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from holdfast.errors import HoldfastError, NameMissing, NameTaken, StoreDenied, StoreError
from holdfast.store.contract import PIECE_BYTES, TEMP_MARK, Bytes, Store, Writer, checked

RETRY_WITHIN_S = 60.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
PART_BYTES = 16 * 2**20
LASTING = {errno.EINVAL, errno.ENAMETOOLONG, errno.EROFS, errno.ENOSPC}

T = TypeVar("T")


class ObjectStore(Store):
    """A prefix of a bucket."""

    def __init__(self, url: str, fs: Any = None) -> None:
        self.url = url.rstrip("/")
        # A cached listing would hide what other machines write.
        self._fs, self._root = (fs, fs._strip_protocol(url)) if fs else url_to_fs(url, use_listings_cache=False)

    def inside(self, folder: str) -> "ObjectStore":
        return ObjectStore(f"{self.url}/{checked(folder)}", self._fs)

    def create(self, name: str, data: Bytes) -> None:
        path, data = self._path(name), bytes(data)
        tries = 0

        def write() -> None:
            nonlocal tries
            tries += 1
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                # A first try whose answer was lost may have written it.
                if tries == 1 or self._fs.cat_file(path) != data:
                    raise

        self._ask(f"write {name}", write)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        action, path = f"write {name}", self._path(name)
        if self.exists(name):
            raise NameTaken(f"can't {action} in {self.url}: it exists")  # sooner than after an upload in vain
        file = self._ask(action, lambda: self._fs.open(path, "xb", block_size=PART_BYTES))
        try:
            yield file
        except BaseException:
            _discard(file)
            raise
        with self._explained(action):
            file.close()

    def replace(self, name: str, data: Bytes) -> None:
        self._ask(f"write {name}", lambda: self._fs.pipe_file(self._path(name), bytes(data)))

    def read(self, name: str) -> bytes:
        return bytes(self._ask(f"read {name}", lambda: self._fs.cat_file(self._path(name))))

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        path, size_bytes = self._path(name), self.size_bytes(name)
        for start in range(0, size_bytes, piece_bytes):
            end = min(start + piece_bytes, size_bytes)
            yield self._ask(f"read {name}", functools.partial(self._fs.cat_file, path, start=start, end=end))

    def size_bytes(self, name: str) -> int:
        # Not `exists`: fsspec's answers no when the storage can't be reached.
        found = self._ask(f"look at {name}", lambda: self._fs.info(self._path(name)))
        if found["type"] != "file":
            raise NameMissing(f"can't look at {name} in {self.url}: it is a folder")
        return int(found["size"])

    def list(self, folder: str = "") -> list[str]:
        path = self._path(folder) if folder else self._root
        try:
            entries = self._ask(f"list {folder}", lambda: self._fs.ls(path, detail=False))
        except NameMissing:
            return []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries if str(entry).strip("/") != path}
        return sorted(name for name in names if TEMP_MARK not in name)

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(NameMissing):
            self._ask(f"delete {folder}", lambda: self._fs.rm(self._path(folder), recursive=True))

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"

    def _ask(self, action: str, request: Callable[[], T]) -> T:
        """The answer to a request, asked again for a while when its failure may pass."""
        deadline = time.monotonic() + RETRY_WITHIN_S
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return request()
            except Exception as error:
                if not _may_pass(error) or time.monotonic() + pause_s > deadline:
                    with self._explained(action):
                        raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        where = f"{action} in {self.url}"
        try:
            yield
        except HoldfastError:
            raise
        except FileExistsError:
            raise NameTaken(f"can't {where}: it exists") from None
        except FileNotFoundError as error:
            if action.startswith("write"):
                raise StoreDenied(f"can't {where}: {error}", hint="create the bucket, or give another store") from None
            raise NameMissing(f"can't {where}: it does not exist") from None
        except PermissionError as error:
            raise StoreDenied(f"can't {where}: {error}", hint="give this machine's identity the right to it") from None
        except Exception as error:
            if _is_about_credentials(error):
                raise StoreDenied(f"can't {where}: {error}", hint="set the cloud's usual credentials") from None
            raise StoreError(f"can't {where}: {type(error).__name__}: {error}") from error


def _may_pass(error: Exception) -> bool:
    lasting = (
        HoldfastError,
        FileExistsError,
        FileNotFoundError,
        PermissionError,
        IsADirectoryError,
        ValueError,
        TypeError,
        KeyError,
    )
    if isinstance(error, lasting) or _is_about_credentials(error) or getattr(error, "errno", None) in LASTING:
        return False
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    return not (isinstance(status, int) and 400 <= status < 500 and status not in (408, 429))


def _is_about_credentials(error: Exception) -> bool:
    return "credential" in type(error).__name__.lower() or "ClientAuthentication" in type(error).__name__


def _discard(file: Any) -> None:
    """Forget an upload. Closing the file, which its destructor would do, would publish what there is of it."""
    with contextlib.suppress(Exception):
        file.discard()
    file.closed = True
