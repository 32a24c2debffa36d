"""What a checkpoint needs from storage: a few verbs, and what each promises."""

import abc
import contextlib
import errno
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import PurePosixPath
from typing import Protocol

from holdfast.errors import HoldfastError, NameMissing, NameTaken, StoreDenied, StoreError, StoreFull

Bytes = bytes | bytearray | memoryview

PIECE_BYTES = 4 * 2**20
# What is asked of an object store at once, where much is to be read.
FILL_BYTES = 16 * 2**20
# A name with this in it is not there yet: readers and listings pass over it.
TEMP_MARK = ".tmp-"


class Writer(Protocol):
    """Takes the bytes of one file, in order."""

    def write(self, data: Bytes, /) -> object: ...


class Store(abc.ABC):
    """A folder on some storage. This is the whole surface.

    Names are ``/``-separated and relative to the folder. Only `create` needs atomicity: of all who create one name
    exactly one succeeds, and a name that exists is complete. What a verb has done is durable when it returns.

    A network may lose the answer to a write that was done. A writer that then finds its own file under the name has
    won. `create` on an object store knows its own file by its bytes, so that writers of equal bytes may all succeed:
    whoever must be the only one writes bytes that nobody else writes.

    Every verb raises `StoreDenied` where permission is lacking, `StoreFull` where there is no room, and `StoreError`
    where the storage fails otherwise, after bounded retries of what may pass.

    Attributes:
        url: the folder, as a person would write it.
    """

    url: str

    @abc.abstractmethod
    def inside(self, folder: str) -> "Store":
        """The same storage, seen from one of its folders."""

    def existing(self) -> "Store":
        """Return the same folder, which is there and which no write makes anew.

        Where the storage has folders, a write raises `RunGone` once this one is moved or deleted. A bucket has none.
        """
        return self

    @abc.abstractmethod
    def create(self, name: str, data: Bytes) -> None:
        """Write a name once.

        Raises:
            NameTaken: it exists; whoever created it first has it.
        """

    @abc.abstractmethod
    def creating(self, name: str) -> AbstractContextManager[Writer]:
        """As `create`, for bytes that come in pieces and are not held in memory.

        The name appears, complete, when the block ends well, and not at all when it raises. What the block itself
        raises passes through as it is.
        """

    def copy(self, source: str, name: str) -> bool:
        """As `create`, with the bytes of another name, which aren't sent; False if the storage can't do that.

        Raises:
            NameMissing: there is no file ``source``.
            NameTaken: ``name`` exists.
        """
        return False

    @abc.abstractmethod
    def replace(self, name: str, data: Bytes) -> None:
        """Put these bytes under a name; readers see the old or the new ones, whole."""

    @abc.abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a name from ``start`` up to ``stop``, as far as it has them; all of them without bounds.

        Raises:
            NameMissing: there is no file of this name.
        """

    @abc.abstractmethod
    def pieces(self, name: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """The bytes of a name, in order, a piece at a time; raises as `read`."""

    def fill(self, name: str, buffer: memoryview) -> Iterator[int]:
        """Read the bytes of a name into a buffer, in order, until either ends; after each piece, how far it is filled.

        Raises as `read`.
        """
        filled = 0
        for piece in self.pieces(name, FILL_BYTES):
            end = min(filled + len(piece), len(buffer))
            buffer[filled:end] = piece[: end - filled]
            filled = end
            yield filled
            if filled == len(buffer):
                return

    @abc.abstractmethod
    def size_bytes(self, name: str) -> int:
        """How many bytes a name has; raises as `read`."""

    @abc.abstractmethod
    def modified(self, name: str) -> datetime:
        """When a name was last written, by the storage's clock, in UTC; raises as `read`."""

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name. A storage that can't be reached raises, and is never a no."""
        try:
            self.size_bytes(name)
        except NameMissing:
            return False
        return True

    @abc.abstractmethod
    def list(self, folder: str = "", after: str = "") -> list[str]:
        """The names in one folder, sorted, files and folders alike; none if there is no such folder.

        Args:
            after: only the names that sort after this one.
        """

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Make a file be gone; it may be gone already."""

    @abc.abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Make a folder and all that is in it be gone; it may be gone already."""

    def sweep(self, before: datetime) -> int:
        """Make the remains of writes be gone that began before this time and never ended, here and in all folders.

        A storage where such remains end by themselves, or can't exist, has nothing to do.

        Returns:
            How many there were.
        """
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def checked(name: str) -> str:
    """The name, if it stays inside the store.

    Raises:
        StoreError: it is absolute, empty, goes upwards, or has a null character in it.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise StoreError(f"{name!r} is not a name inside the store")
    return "/".join(parts)


def temporary(name: str) -> str:
    """A name for bytes on their way to ``name``."""
    return f"{name}{TEMP_MARK}{secrets.token_hex(4)}"


@contextlib.contextmanager
def explained(action: str) -> Iterator[None]:
    """Whatever the system or a library raises in the block is one of our errors after it."""
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
        raise StoreError(f"can't {action}: {error}") from error


def _denied(action: str, error: OSError) -> StoreDenied:
    return StoreDenied(f"can't {action}: {error.strerror or error}", hint="give a store that you may write to")
