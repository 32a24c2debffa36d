"""A folder on a local file system."""

import contextlib
import errno
import os
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

from holdfast.errors import NameMissing
from holdfast.store.contract import PIECE_BYTES, TEMP_MARK, Bytes, Store, Writer, checked, explained, temporary


class LocalStore(Store):
    """A folder on a local file system; it is made when something is first written to it."""

    def __init__(self, path: str) -> None:
        self.root = Path(path).expanduser().absolute()
        self.url = str(self.root)

    def inside(self, folder: str) -> "LocalStore":
        return LocalStore(str(self._path(folder)))

    def create(self, name: str, data: Bytes) -> None:
        with self.creating(name) as writer:
            writer.write(data)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        """As the contract says.

        Source: link(2) fails if the name exists, where rename(2) would replace it.
        """
        with self._writing(name) as (temp, target, writer):
            yield writer
            writer.flush()
            os.fsync(writer.fileno())
            os.link(temp, target)

    def replace(self, name: str, data: Bytes) -> None:
        with self._writing(name) as (temp, target, writer):
            writer.write(data)
            writer.flush()
            os.fsync(writer.fileno())
            temp.rename(target)

    def read(self, name: str) -> bytes:
        with explained(f"read {name} in {self.url}"):
            return self._path(name).read_bytes()

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        with explained(f"read {name} in {self.url}"), self._path(name).open("rb") as file:
            while piece := file.read(piece_bytes):
                yield piece

    def size_bytes(self, name: str) -> int:
        with explained(f"look at {name} in {self.url}"):
            path = self._path(name)
            size_bytes = path.stat().st_size
            if not path.is_file():
                raise NameMissing(f"can't look at {name} in {self.url}: it is no file")
            return size_bytes

    def list(self, folder: str = "") -> list[str]:
        with explained(f"list {folder} in {self.url}"):
            try:
                names = os.listdir(self._path(folder) if folder else self.root)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(name for name in names if TEMP_MARK not in name)

    def delete_folder(self, folder: str) -> None:
        path = self._path(folder)
        with explained(f"delete {folder} in {self.url}"):
            try:
                names = os.listdir(path)
            except FileNotFoundError:
                return
            for name in names:
                (path / name).unlink(missing_ok=True)
            path.rmdir()

    def _path(self, name: str) -> Path:
        return self.root / checked(name)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[tuple[Path, Path, BufferedWriter]]:
        """A temporary file beside the target; gone when the block ends, however it ends."""
        target = self._path(name)
        temp = target.with_name(temporary(target.name))
        with explained(f"write {name} in {self.url}"):
            _make_folder(target.parent)
            try:
                with temp.open("xb") as writer:
                    yield temp, target, writer
                _sync_folder(target.parent)
            finally:
                temp.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """A name is durable when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
