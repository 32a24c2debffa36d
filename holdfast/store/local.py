"""The store on a local file system."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import NameMissing, RunGone
from holdfast.memory import direct
from holdfast.store import folders
from holdfast.store.contract import PIECE_BYTES, TEMP_MARK, Bytes, Store, Writer, checked, temporary, translate_errors
from holdfast.store.naming import NO_LINKS, link_once, name_once

# If a file vanishes during a write, wait for at most this number of seconds to see whether the store vanishes, too.
DELETED_WITHIN_S = 2.0


class LocalStore(Store):
    """A folder on a local file system; the first write creates it.

    The folder itself may be a symbolic link. Symbolic links, pipes and devices inside it are refused.
    """

    is_disk = True

    def __init__(self, path: str, *, makes_root: bool = True) -> None:
        self.root = Path(path).expanduser().absolute()
        self.url = str(self.root)
        self._makes_root = makes_root

    def inside(self, folder: str) -> "LocalStore":
        return LocalStore(str(self.root / checked(folder)))

    def existing(self) -> "LocalStore":
        return LocalStore(self.url, makes_root=False)

    def create(self, name: str, data: Bytes) -> None:
        with self.creating(name) as writer:
            writer.write(data)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        """Create a file from pieces: write a temporary file, and link it to the final name when the block ends."""
        action = f"write {name} in {self.url}"
        with self._writing(name, action) as (folder, temp, target, file):
            yield _Writer(file, action)
            with self._writable(action):
                os.fsync(file)
                name_once(file, temp, target, folder, str((self.root / name).parent))
                os.fsync(folder)

    def copy(self, source: str, name: str) -> bool:
        """Make a hard link. Later writes don't change the copy: they replace a file, and never change it in place."""
        with (
            self._writable(f"copy {source} to {name} in {self.url}"),
            self._folder(source) as (there, old),
            self._folder(name, make=True) as (here, new),
        ):
            folders.stat_file(there, old, self.root / source)
            if folders.stat_name(here, new, self.root / name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
            try:
                link_once(old, there, new, here)
            except OSError as error:
                if error.errno in NO_LINKS:
                    return False
                raise
            os.fsync(here)
        return True

    def replace(self, name: str, data: Bytes) -> None:
        action = f"write {name} in {self.url}"
        with self._writing(name, action) as (folder, temp, target, file), self._writable(action):
            direct.write_direct(file, 0, memoryview(data).cast("B"))
            os.fsync(file)
            os.rename(temp, target, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with translate_errors(f"read {name} in {self.url}"), self._open(name) as file:
            file.seek(start)
            return file.read() if stop is None else file.read(max(0, stop - start))

    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        with translate_errors(f"read {name} in {self.url}"), self._open(name) as file:
            while piece := file.read(piece_bytes):
                yield piece

    def fill(self, name: str, buffer: memoryview, start: int = 0) -> Iterator[int]:
        with translate_errors(f"read {name} in {self.url}"), self._open(name) as file:
            yield from direct.fill(file.fileno(), buffer, start)

    def size_bytes(self, name: str) -> int:
        return self._look(name).st_size

    def modified(self, name: str) -> datetime:
        return datetime.fromtimestamp(self._look(name).st_mtime, UTC)

    def list(self, folder: str = "", after: str = "") -> list[str]:
        parts = checked(folder).split("/") if folder else []
        with translate_errors(f"list {folder} in {self.url}" if folder else f"list {self.url}"):
            try:
                with folders.opened(self.root, parts) as descriptor:
                    names = os.listdir(descriptor)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(name for name in names if TEMP_MARK not in name and name > after)

    def delete(self, name: str) -> None:
        self._delete(name, lambda folder, last: os.unlink(last, dir_fd=folder))

    def delete_folder(self, folder: str) -> None:
        def remove(parent: int, last: str) -> None:
            while folders.stat_name(parent, last, self.root / folder):
                with contextlib.suppress(FileNotFoundError):  # another process is deleting the folder, too
                    shutil.rmtree(last, dir_fd=parent)

        self._delete(folder, remove)

    def sweep(self, before: datetime, is_spared: Callable[[str], bool] = lambda folder: False) -> int:
        swept = 0
        with (
            translate_errors(f"sweep {self.url}"),
            contextlib.suppress(FileNotFoundError),
            folders.opened(self.root, []) as root,
        ):
            for path, inner, names, folder in os.fwalk(".", dir_fd=root):
                if path == ".":
                    inner[:] = [name for name in inner if not is_spared(name)]
                for name in (name for name in names if TEMP_MARK in name):
                    with contextlib.suppress(FileNotFoundError):  # the write of this temporary file has just ended
                        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < before.timestamp():
                            os.unlink(name, dir_fd=folder)
                            swept += 1
        return swept

    @contextlib.contextmanager
    def _folder(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder that contains a file, and the file's name in this folder."""
        *parts, last = checked(name).split("/")
        with folders.opened(self.root, parts, make=make, make_root=self._makes_root) as folder:
            yield folder, last

    @contextlib.contextmanager
    def _writable(self, action: str) -> Iterator[None]:
        """Translate the errors of a write as `translate_errors` does. Raise `RunGone` if the whole folder is missing.

        ``rm -rf`` deletes the files first, so a file may be missing shortly before the folder is.
        """
        try:
            with translate_errors(action):
                yield
        except NameMissing:
            if self._makes_root:
                raise
            deadline = time.monotonic() + DELETED_WITHIN_S
            while self.root.is_dir():
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            raise RunGone.of(self.url) from None

    def _delete(self, name: str, remove: Callable[[int, str], object]) -> None:
        with (
            translate_errors(f"delete {name} in {self.url}"),
            contextlib.suppress(FileNotFoundError),
            self._folder(name) as (folder, last),
        ):
            folders.stat_name(folder, last, self.root / name)
            remove(folder, last)
            os.fsync(folder)

    def _open(self, name: str) -> BinaryIO:
        with self._folder(name) as (folder, last):
            return folders.open_file(folder, last, self.root / name)

    def _look(self, name: str) -> os.stat_result:
        with translate_errors(f"look at {name} in {self.url}"), self._folder(name) as (folder, last):
            return folders.stat_file(folder, last, self.root / name)

    @contextlib.contextmanager
    def _writing(self, name: str, action: str) -> Iterator[tuple[int, str, str, int]]:
        """Create a temporary file for the block. Yield its folder, its name, the file's final name and a descriptor."""
        with contextlib.ExitStack() as stack:
            with self._writable(action):
                folder, target = stack.enter_context(self._folder(name, make=True))
                folders.stat_name(folder, target, self.root / name)
                temp = temporary(target)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                file = os.open(temp, flags, 0o666, dir_fd=folder)
                stack.callback(_unlink, temp, folder)
                stack.callback(os.close, file)
            yield folder, temp, target, file


class _Writer:
    """A writer that appends to a new file and raises `StoreError` if the file system fails."""

    def __init__(self, file: int, action: str) -> None:
        self._file, self._action = file, action
        self._written = 0

    def write(self, data: Bytes) -> None:
        with translate_errors(self._action):
            view = memoryview(data).cast("B")
            direct.write_direct(self._file, self._written, view)
            self._written += len(view)


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
