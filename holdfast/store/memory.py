"""The store in this process's memory, for tests that start no ranks."""

import contextlib
import io
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

from holdfast.errors import NameMissing, NameTaken
from holdfast.store.contract import PIECE_BYTES, Bytes, Store, Writer, checked

_files: dict[str, tuple[bytes, datetime]] = {}
_lock = threading.Lock()


class MemoryStore(Store):
    """A folder in this process's memory. All stores that are opened with the same path share their files."""

    def __init__(self, path: str) -> None:
        self._root = path.strip("/")
        self.url = f"memory://{self._root}"

    def inside(self, folder: str) -> "MemoryStore":
        return MemoryStore(self._path(folder))

    def create(self, name: str, data: Bytes) -> None:
        with _lock:
            if self._path(name) in _files:
                raise NameTaken(f"can't write {name} in {self.url}: it exists")
            _files[self._path(name)] = bytes(data), datetime.now(UTC)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        buffer = io.BytesIO()
        yield buffer
        self.create(name, buffer.getvalue())

    def copy(self, source: str, name: str) -> bool:
        self.create(name, self.read(source))
        return True

    def replace(self, name: str, data: Bytes) -> None:
        with _lock:
            _files[self._path(name)] = bytes(data), datetime.now(UTC)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._file(name)[0][start:stop]

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        data = self.read(name)
        for start in range(0, len(data), piece_bytes):
            yield data[start : start + piece_bytes]

    def size_bytes(self, name: str) -> int:
        return len(self.read(name))

    def modified(self, name: str) -> datetime:
        return self._file(name)[1]

    def list(self, folder: str = "", after: str = "") -> list[str]:
        prefix = f"{self._path(folder) if folder else self._root}/"
        with _lock:
            names = {path.removeprefix(prefix).split("/")[0] for path in _files if path.startswith(prefix)}
        return sorted(name for name in names if name > after)

    def delete(self, name: str) -> None:
        with _lock:
            _files.pop(self._path(name), None)

    def delete_folder(self, folder: str) -> None:
        prefix = f"{self._path(folder)}/"
        with _lock:
            for path in [path for path in _files if path.startswith(prefix)]:
                del _files[path]

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"

    def _file(self, name: str) -> tuple[bytes, datetime]:
        try:
            return _files[self._path(name)]
        except KeyError:
            raise NameMissing(f"can't read {name} in {self.url}: it does not exist") from None
