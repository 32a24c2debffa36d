"""Give a file its final name atomically and only once: by link(2), or without hard links by an exclusive rename."""

import ctypes
import errno
import os

from holdfast.errors import StoreDenied

# The errors of link(2) if the file system or a policy of the machine allows no hard links, or no further hard link.
NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
# The errors of renameat2(2) if the file system doesn't support an exclusive rename.
NO_EXCLUSIVE_RENAME = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
RENAME_NOREPLACE = 1


def name_once(file: int, temp: str, name: str, folder: int, where: str) -> None:
    """Give a temporary file its final name, unless another file has that name.

    Args:
        file: the descriptor of the open file.
        temp: the file's temporary name, in the same folder.
        where: the folder's path, for the message.

    Raises:
        FileExistsError: another file has the name.
        StoreDenied: the file system has neither hard links nor an exclusive rename.

    Source: link(2) and renameat2(2) with RENAME_NOREPLACE fail if the name exists, where rename(2) would replace it.
    """
    try:
        link_once(temp, folder, name, folder)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _rename_once(file, temp, name, folder, where)


def link_once(source: str, there: int, name: str, here: int) -> None:
    """Link a file to a second name, unless another file has that name.

    On NFS, link(2) may report EEXIST although this call made the link, if the server's first response was lost (see
    open(2), O_EXCL). So succeed if the name is already linked to the same file.
    """
    try:
        os.link(source, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
    except FileExistsError:
        if not _is_same(os.lstat(source, dir_fd=there), os.lstat(name, dir_fd=here)):
            raise


def _rename_once(file: int, temp: str, name: str, folder: int, where: str) -> None:
    try:
        _renameat2(folder, temp, name)
    except FileExistsError:
        if not _is_same(os.fstat(file), os.lstat(name, dir_fd=folder)):
            raise
    except OSError as error:
        if error.errno not in NO_EXCLUSIVE_RENAME:
            raise
        raise StoreDenied(
            f"can't write {name} in {where}: its file system has neither hard links nor a rename that refuses to "
            "replace a file, so two writers could both create the name",
            hint="give a folder on ext4, xfs, tmpfs, NFS or vfat, or a bucket",
        ) from None


def _renameat2(folder: int, old: str, new: str) -> None:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # this isn't Linux, or the C library is from before 2018
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new) from None
    if call(folder, os.fsencode(old), folder, os.fsencode(new), RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def _is_same(ours: os.stat_result, found: os.stat_result) -> bool:
    return (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino)
