"""Access to the files and folders below a root folder. Symbolic links, pipes and devices are refused.

A run may come from an untrusted source, and a link in it could lead out of the run. The root folder itself and its
parent folders belong to the user, and may be links.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import Unreadable

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def opened(root: Path, parts: Sequence[str], *, make: bool = False, make_root: bool = True) -> Iterator[int]:
    """Open the folder at the path ``parts`` below the root. Yield its file descriptor, and close it after the block.

    Args:
        make: create missing folders.
        make_root: if ``make`` is True, also create the root and its parent folders.

    Raises:
        OSError: the folder doesn't exist, or can't be read or created.
        Unreadable: a folder on the path is a symbolic link.
    """
    if make and make_root:
        _make_root(root)
    # A signal may raise an exception between any two lines. So a descriptor is removed from the list before it
    # is closed. Closing the descriptor twice would close another thread's file, or raise an OSError that hides the
    # signal's exception.
    unclosed = [_open_folder(str(root), None, root, make=make)]
    try:
        path = root
        for part in parts:
            path = path / part
            if stat_name(unclosed[-1], part, path) is None and make:
                with contextlib.suppress(FileExistsError):  # another process has created the folder
                    os.mkdir(part, dir_fd=unclosed[-1])
                os.fsync(unclosed[-1])
            unclosed.append(_open_folder(part, unclosed[-1], path, make=make))
            os.close(unclosed.pop(0))
        yield unclosed[-1]
    finally:
        while unclosed:
            os.close(unclosed.pop())


def _open_folder(name: str, parent: int | None, path: Path, *, make: bool) -> int:
    follow = 0 if parent is None else os.O_NOFOLLOW
    try:
        return os.open(name, FOLDER | follow, dir_fd=parent)
    except NotADirectoryError:
        if make:
            raise
        # The name belongs to a file. For a reader, the folder then doesn't exist.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None


def stat_name(folder: int, name: str, path: Path) -> os.stat_result | None:
    """Return the result of stat(2) for a name in a folder; None if the name doesn't exist.

    Raises:
        Unreadable: the name is a symbolic link.
    """
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise Unreadable(
            f"{path} is a symbolic link; a run must not contain one", hint="replace the link with its target"
        )
    return found


def stat_file(folder: int, name: str, path: Path) -> os.stat_result:
    """Return the result of stat(2) for a regular file in a folder.

    Raises:
        FileNotFoundError: the name doesn't exist, or is a folder.
        Unreadable: the name is a symbolic link, a pipe or a device.
    """
    found = stat_name(folder, name, path)
    if found is None or stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    _check_regular(found, path)
    return found


def open_file(folder: int, name: str, path: Path) -> BinaryIO:
    """Open a regular file for reading; raises as `stat_file` does."""
    stat_file(folder, name, path)  # check before opening, because opening a device can have effects
    descriptor = os.open(name, FILE, dir_fd=folder)
    file = os.fdopen(descriptor, "rb")
    try:
        _check_regular(os.fstat(descriptor), path)
    except Unreadable:
        file.close()
        raise
    return file


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable(
            f"{path} is not a regular file", hint="remove this entry; a run contains files and folders only"
        )


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
