"""The interface of a store: its methods, and the guarantees of each method."""

import abc
import contextlib
import errno
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import PurePosixPath
from typing import Protocol

from holdfast.errors import HoldfastError, NameMissing, NameTaken, StoreDenied, StoreError, StoreFull, Unreadable

Bytes = bytes | bytearray | memoryview

PIECE_BYTES = 4 * 2**20
# The size of each request when a whole file is read from an object store.
FILL_BYTES = 16 * 2**20
# An action whose description begins with one of these words changes nothing on the storage.
READS = ("read", "list", "look")
# The system's errors for a file that exists but can't be read: a bad sector, a loop of links, a damaged file system.
BROKEN = {errno.EIO, errno.ELOOP, getattr(errno, "EUCLEAN", errno.EIO)}
# Marks the name of a file that is still being written; `list` leaves such names out.
TEMP_MARK = ".tmp-"


class Writer(Protocol):
    """A file that is being written: each call of `write` appends bytes."""

    def write(self, data: Bytes, /) -> object: ...


class Store(abc.ABC):
    """A folder on some storage.

    Names are ``/``-separated and relative to the folder. If several writers create the same name, exactly one of them
    succeeds. A file appears under its name only when it is complete. Every write is durable when its method returns.

    A network may lose the response to a write that succeeded. If a writer then finds its own file under the name, its
    write has succeeded. `create` on an object store recognizes its own file by the bytes, so several writers of equal
    bytes may all succeed. A writer that must be the only one to succeed includes a random token in its bytes.

    Every method raises `StoreDenied` if a permission is missing, `StoreFull` if no space is left, and `StoreError` if
    the storage fails in another way. Before that, transient failures are retried for a limited time.

    Attributes:
        url: the folder's path or URL, as the user has given it.
        is_disk: whether the storage is a file system of this machine, on which a request takes microseconds.
    """

    url: str
    is_disk = False

    @abc.abstractmethod
    def inside(self, folder: str) -> "Store":
        """Return a store for a subfolder of this store's folder."""

    def existing(self) -> "Store":
        """Return a store for the same folder whose writes never create the folder itself.

        On a file system, a write raises `RunGone` if the folder is missing. Buckets have no folders, so a bucket's
        store returns itself.
        """
        return self

    @abc.abstractmethod
    def create(self, name: str, data: Bytes) -> None:
        """Create a file, unless its name exists.

        Raises:
            NameTaken: the name exists; its file is unchanged.
        """

    @abc.abstractmethod
    def creating(self, name: str) -> AbstractContextManager[Writer]:
        """Yield a `Writer` for a new file, so that the caller needn't hold all bytes in memory. Raise as `create` does.

        The complete file appears when the ``with`` block ends. If the block raises an error, no file appears, and the
        caller gets this error.
        """

    def copy(self, source: str, name: str) -> bool:
        """Copy ``source`` to ``name`` on the storage, without sending bytes. Return False if the storage can't copy.

        Raises:
            NameMissing: no file has the name ``source``.
            NameTaken: ``name`` exists.
        """
        return False

    @abc.abstractmethod
    def replace(self, name: str, data: Bytes) -> None:
        """Write a file, or replace it atomically: a reader sees either the old or the new bytes."""

    @abc.abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of a file, by default all; fewer if the file ends earlier.

        Raises:
            NameMissing: no file has this name.
        """

    @abc.abstractmethod
    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yield a file's bytes in order, in pieces of ``piece_bytes`` bytes; the last piece may be shorter.

        Raises as `read` does.
        """

    def fill(self, name: str, buffer: memoryview, start: int = 0) -> Iterator[int]:
        """Read a file from ``start`` into a buffer, until the file ends or the buffer is full.

        After each piece, yield the number of bytes that were read so far.

        Raises as `read` does.
        """
        filled = 0
        while filled < len(buffer):
            end = min(filled + FILL_BYTES, len(buffer))
            piece = self.read(name, start + filled, start + end)
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            yield filled
            if filled < end:
                return

    @abc.abstractmethod
    def size_bytes(self, name: str) -> int:
        """Return a file's size in bytes; raises as `read` does."""

    @abc.abstractmethod
    def modified(self, name: str) -> datetime:
        """Return the time of a file's last write in UTC, by the storage's clock; raises as `read` does."""

    def exists(self, name: str) -> bool:
        """Return whether a file has this name. If the storage can't be reached, raise StoreError."""
        try:
            self.size_bytes(name)
        except NameMissing:
            return False
        return True

    @abc.abstractmethod
    def list(self, folder: str = "", after: str = "") -> list[str]:
        """Return the sorted names of the files and folders in a folder; an empty list if the folder doesn't exist.

        Args:
            after: return only the names that sort after this one.
        """

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""

    @abc.abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete a folder and everything in it, if it exists."""

    def sweep(self, before: datetime, is_spared: Callable[[str], bool] = lambda folder: False) -> int:
        """Delete the remains of unfinished writes that began before a time, in this folder and all subfolders.

        By default this does nothing, as is right for a storage without remains, or that deletes the remains itself.

        Args:
            is_spared: called with the name of each direct subfolder. Returns True if nothing in the subfolder may be
                deleted, because a write there may still be running.

        Returns:
            The number of deletions.
        """
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def checked(name: str) -> str:
    """Return the normalized name. Check that it doesn't lead out of the store.

    Raises:
        StoreError: the name is absolute or empty, or contains ``..`` or a null character.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise StoreError(f"{name!r} is not a name inside the store")
    return "/".join(parts)


def temporary(name: str) -> str:
    """Return a random temporary name for a file that is renamed to ``name`` once it is complete."""
    return f"{name}{TEMP_MARK}{secrets.token_hex(4)}"


@contextlib.contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Turn an `OSError` that the block raises into the matching `StoreError`: "can't <action>: ..."."""
    try:
        yield
    except HoldfastError:
        raise
    except FileExistsError:
        raise NameTaken(f"can't {action}: it exists") from None
    except FileNotFoundError:
        raise NameMissing(f"can't {action}: it does not exist") from None
    except PermissionError as error:
        raise _denied(action, error) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"can't {action}: no space left", hint="make room; the same command then continues the run"
            ) from None
        if error.errno in (errno.EROFS, errno.ENOTDIR):
            raise _denied(action, error) from None
        if error.errno == errno.EISDIR:
            raise Unreadable(f"can't {action}: a folder has this name", hint="move the folder away") from None
        if error.errno in BROKEN and action.startswith(READS):
            hint = "if this repeats, holdfast quarantine RUN COMMIT REASON goes back to the checkpoint before"
            raise Unreadable(
                f"can't {action}: {error.strerror}", hint=hint if error.errno == errno.EIO else ""
            ) from error
        raise StoreError(f"can't {action}: {error}") from error


def _denied(action: str, error: OSError) -> StoreDenied:
    may = "read" if action.startswith(READS) else "write to"
    return StoreDenied(
        f"can't {action}: {error.strerror or error}",
        hint=f"give a store that you may {may}",
        lacks_right=isinstance(error, PermissionError),
    )
