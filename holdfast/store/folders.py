"""Files and folders below a root, by descriptors that no symbolic link, pipe or device can divert or block.

What is in a run may come from anywhere. A root, and what lies above it, is the user's, and may be a link.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import StoreError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def opened(root: Path, parts: Sequence[str], *, make: bool = False, make_root: bool = True) -> Iterator[int]:
    """Open the folder at ``parts`` below the root, for the block; with ``make`` it is made if need be.

    Args:
        make_root: ``make`` is also for the root and what lies above it.

    Raises:
        OSError: there is none, or it can't be read or made.
        StoreError: a part is a symbolic link.
    """
    if make and make_root:
        _make_root(root)
    folder, path = _open_folder(str(root), None, root, make=make), root
    try:
        for part in parts:
            path = path / part
            if look(folder, part, path) is None and make:
                with contextlib.suppress(FileExistsError):  # another process was first
                    os.mkdir(part, dir_fd=folder)
                os.fsync(folder)
            inner = _open_folder(part, folder, path, make=make)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _open_folder(name: str, parent: int | None, path: Path, *, make: bool) -> int:
    follow = 0 if parent is None else os.O_NOFOLLOW
    try:
        return os.open(name, FOLDER | follow, dir_fd=parent)
    except NotADirectoryError:
        if make:
            raise
        # Who only looks finds nothing below a file.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None


def look(folder: int, name: str, path: Path) -> os.stat_result | None:
    """What is known of a name in a folder; None if there is no such name.

    Raises:
        StoreError: it is a symbolic link.
    """
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{path} is a symbolic link; a run holds none", hint="put what it points to in its place")
    return found


def look_at_file(folder: int, name: str, path: Path) -> os.stat_result:
    """As `look`, of a file.

    Raises:
        FileNotFoundError: there is none, or there is a folder of this name.
        StoreError: it is a symbolic link, a pipe or a device.
    """
    found = look(folder, name, path)
    if found is None or stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    _check_regular(found, path)
    return found


def open_file(folder: int, name: str, path: Path) -> BinaryIO:
    """A file, to be read; raises as `look_at_file`."""
    look_at_file(folder, name, path)  # opening a device can do things
    descriptor = os.open(name, FILE, dir_fd=folder)
    file = os.fdopen(descriptor, "rb")
    try:
        _check_regular(os.fstat(descriptor), path)
    except StoreError:
        file.close()
        raise
    return file


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a regular file", hint="remove it; a run holds files and folders only")


def _make_root(folder: Path) -> None:
    if not folder.is_dir():
        _make_root(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        descriptor = os.open(folder.parent, FOLDER)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
