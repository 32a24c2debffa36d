"""The few verbs that a checkpoint needs from storage. This is the whole surface.

Only `create` needs atomicity: of all who create one name exactly one succeeds, and a name that exists is complete.
Names are ``/``-separated and relative to the store's root.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path, PurePosixPath
from typing import Protocol

from holdfast.errors import ConfigError, HoldfastError, NameMissing, NameTaken, StoreDenied, StoreError, StoreFull

Bytes = bytes | bytearray | memoryview

# A name with this in it is not there yet: readers and listings pass over it.
TEMP_MARK = ".tmp-"
PIECE_BYTES = 4 * 2**20


class Writer(Protocol):
    """Takes the bytes of one file, in order."""

    def write(self, data: Bytes, /) -> object: ...


class Store:
    """A folder on a local file system."""

    def __init__(self, url: str) -> None:
        scheme, separator, path = url.partition("://")
        if separator and scheme != "file":
            raise ConfigError(f"store = {url!r}: {scheme}:// is not supported", hint="give a local folder")
        self.url = url
        self.root = Path(path if separator else url).expanduser().absolute()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def inside(self, folder: str) -> "Store":
        """The same store, seen from one of its folders."""
        return Store(str(self._path(folder)))

    def create(self, name: str, data: Bytes) -> None:
        """Write a name once, durably.

        Raises:
            NameTaken: it exists; whoever created it first has it.
        """
        with self.creating(name) as writer:
            writer.write(data)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        """As `create`, for bytes that come in pieces: the name appears, complete, when the block ends well.

        Source: link(2) fails if the name exists, where rename(2) would replace it.
        """
        with self._writing(name) as (temp, target, writer):
            yield writer
            writer.flush()
            os.fsync(writer.fileno())
            os.link(temp, target)

    def replace(self, name: str, data: Bytes) -> None:
        """Put these bytes under a name, atomically and durably; readers see the old or the new ones, whole."""
        with self._writing(name) as (temp, target, writer):
            writer.write(data)
            writer.flush()
            os.fsync(writer.fileno())
            temp.rename(target)

    def read(self, name: str) -> bytes:
        """All bytes of a name.

        Raises:
            NameMissing: there is none.
        """
        with _explained(f"read {name} in {self.root}"):
            return self._path(name).read_bytes()

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """The bytes of a name, in order, a piece at a time."""
        with _explained(f"read {name} in {self.root}"), self._path(name).open("rb") as file:
            while piece := file.read(piece_bytes):
                yield piece

    def size_bytes(self, name: str) -> int:
        """How many bytes a name has."""
        with _explained(f"look at {name} in {self.root}"):
            return self._path(name).stat().st_size

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        with _explained(f"look at {name} in {self.root}"):
            return self._path(name).is_file()

    def list(self, folder: str = "") -> list[str]:
        """The names in one folder, sorted, files and folders alike; none if there is no such folder."""
        with _explained(f"list {self.root / folder}"):
            try:
                names = os.listdir(self._path(folder) if folder else self.root)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(name for name in names if TEMP_MARK not in name)

    def delete_folder(self, folder: str) -> None:
        """Make a folder and its files be gone; it may be gone already."""
        path = self._path(folder)
        with _explained(f"delete {folder} in {self.root}"):
            try:
                names = os.listdir(path)
            except FileNotFoundError:
                return
            for name in names:
                (path / name).unlink(missing_ok=True)
            path.rmdir()

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise StoreError(f"{name!r} is not a name inside {self.url}")
        return self.root.joinpath(*parts)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[tuple[Path, Path, BufferedWriter]]:
        """A temporary file beside the target; gone when the block ends, however it ends."""
        target = self._path(name)
        temp = target.with_name(f"{target.name}{TEMP_MARK}{secrets.token_hex(4)}")
        with _explained(f"write {name} in {self.root}"):
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


@contextlib.contextmanager
def _explained(action: str) -> Iterator[None]:
    try:
        yield
    except HoldfastError:
        raise
    except FileExistsError:
        raise NameTaken(f"can't {action}: it exists") from None
    except FileNotFoundError:
        raise NameMissing(f"can't {action}: it does not exist") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"can't {action}: no space left", hint="make room; the same command then continues the run"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise StoreDenied(f"can't {action}: {error.strerror}", hint="give a folder that you may write to") from None
        raise StoreError(f"can't {action}: {error}") from error
