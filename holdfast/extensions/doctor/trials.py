"""Try each verb (method) of a store once, in a new folder: report whether the verb works, or which right is missing."""

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from holdfast.errors import HoldfastError, NameTaken, StoreDenied
from holdfast.store.contract import Store
from holdfast.store.local import LocalStore
from holdfast.store.rights import find_rights

PREFIX = "holdfast-check-"
DATA = b"0123456789"
# The names of the files that the trials create.
NAMES = ("file", "replaced", "large", "raced", "copied", "unfinished")
# The smallest part that S3 accepts, except for the last part of an upload.
PART_BYTES = 5 * 2**20
# A trial repeats a failed request only for this number of seconds, so as to report a failing store soon. A run repeats
# its requests for a minute.
RETRY_WITHIN_S = 5.0
# The seconds that an interrupted request gets to end before the trial's files are deleted.
SETTLES_S = 1.0

Outcome = Literal["ok", "not offered", "denied", "failed", "not tried"]


@dataclass(frozen=True)
class Trial:
    """The result of trying one verb of a store.

    Attributes:
        rights: the missing rights, if the storage has denied the verb. If it isn't known which right is missing, all
            rights that may be missing.
        message: the storage provider's message, or the reason why the verb wasn't tried.
    """

    verb: str
    outcome: Outcome
    seconds: float = 0.0
    rights: tuple[str, ...] = ()
    message: str = ""
    hint: str = ""

    @property
    def is_good(self) -> bool:
        return self.outcome in ("ok", "not offered")


class Misbehaved(Exception):
    """An operation of a store violated the contract of stores."""


class NotOffered(Exception):
    """The storage lacks an optional verb. The message says what a run does instead."""


class NotTried(Exception):
    """A verb couldn't be tried. The message says why."""


@dataclass
class Trials:
    """The trials of one store. They write into the folder `name`, which `clean` deletes.

    Attributes:
        clock_s: the storage's clock minus this machine's clock, in seconds; None if it isn't known.
    """

    store: Store
    name: str = field(default_factory=lambda: PREFIX + secrets.token_hex(8))
    clock_s: float | None = None

    def __post_init__(self) -> None:
        self._rights = find_rights(self.store.url)
        self._good: set[str] = set()
        self._proven: set[str] = set()
        self._missing: set[str] = set()
        self._folders = _list_missing(self.store)
        self._wrote = False
        self._inner = self.store.inside(self.name)
        for store in (self.store, self._inner):
            for name, value in (("part_bytes", PART_BYTES), ("retry_within_s", RETRY_WITHIN_S)):
                if hasattr(store, name):  # only if the store is an object store
                    setattr(store, name, value)

    def run(self) -> Iterator[Trial]:
        """Try each verb, and yield the results. If the store refuses to delete, write nothing."""
        steps: list[tuple[str, tuple[str, ...], Callable[[], None]]] = [
            ("list", (), self._list),
            ("exists", (), self._exists),
            ("delete", (), self._delete),
            ("abort", (), self._abort),
            ("create", ("delete",), self._create),
            ("read", (), self._read),
            ("read a range", (), self._read_range),
            ("look", (), self._look),
            ("list after", ("list",), self._list_after),
            ("create again", ("create",), self._create_again),
            ("replace", ("create",), self._replace),
            ("upload", ("create", "abort"), self._upload),
            ("upload again", ("upload",), self._upload_again),
            ("copy", ("upload",), self._copy),
            ("sweep", ("upload",), self._sweep),
            ("delete a folder", ("create",), self._delete_folder),
        ]
        is_reachable = True
        for verb, needed, step in steps:
            unreachable = Trial(verb, "not tried", message="the storage can't be reached")
            trial = self._try(verb, needed, step) if is_reachable else unreachable
            is_reachable = is_reachable and (verb, trial.outcome) != ("list", "failed")
            if trial.is_good:
                self._good.add(verb)
                self._proven.update(self._rights.get(verb, ()))
            if len(trial.rights) == 1:
                self._missing.update(trial.rights)
            yield trial

    def clean(self, *, interrupted: bool = False) -> str:
        """Delete everything that the trials wrote. If something remains, return the folder's URL; otherwise "".

        Args:
            interrupted: whether the trials were interrupted. If so, wait first, because a request to a cloud may still
                run.
        """
        if not self._wrote:
            return ""
        if interrupted:
            time.sleep(SETTLES_S)
        with contextlib.suppress(Exception):  # ignore an error here, because the loop below finds any file that remains
            self._inner.sweep(datetime.now(UTC) + timedelta(days=1))
        with contextlib.suppress(Exception):
            self.store.delete_folder(self.name)
        is_clean = True
        for name in NAMES:  # deleting a folder needs the right to list it; deleting a file doesn't
            try:
                self._inner.delete(name)
            except HoldfastError:
                is_clean = False
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(HoldfastError):
            is_clean = not self._inner.list()
        return "" if is_clean else self._inner.url

    def _try(self, verb: str, needed: tuple[str, ...], step: Callable[[], None]) -> Trial:
        missing = [each for each in needed if each not in self._good]
        if missing:
            return Trial(verb, "not tried", message=f"{missing[0]} has to work first")
        trial = functools.partial(Trial, verb)
        began = time.monotonic()
        try:
            step()
        except NotTried as error:
            return trial("not tried", message=str(error))
        except NotOffered as error:
            return trial("not offered", message=str(error))
        except Misbehaved as error:
            return trial("failed", time.monotonic() - began, message=str(error))
        except HoldfastError as error:
            outcome: Outcome = "denied" if isinstance(error, StoreDenied) else "failed"
            rights = self._name_missing(verb) if error.data.get("lacks_right") else ()
            message = " ".join(error.message.split())
            return trial(outcome, time.monotonic() - began, rights, message, "" if rights else error.hint)
        return trial("ok", time.monotonic() - began)

    def _name_missing(self, verb: str) -> tuple[str, ...]:
        """Return the rights that a denied verb lacks; if unknown, its rights that no successful verb has used."""
        rights = self._rights.get(verb, ())
        known = tuple(right for right in rights if right in self._missing)
        return known or tuple(right for right in rights if right not in self._proven) or rights

    def _list(self) -> None:
        self.store.list()
        _expect(self._inner.list(), [], "a folder that doesn't exist is not listed as empty")

    def _exists(self) -> None:
        _expect(self._inner.exists("nothing"), False, "a name that doesn't exist is said to exist")

    def _delete(self) -> None:
        self._inner.delete("nothing")

    def _abort(self) -> None:
        abort: Callable[[], None] | None = getattr(self._inner, "abort_nothing", None)
        if not abort:
            raise NotOffered("the storage ends unfinished uploads by itself")
        abort()

    def _create(self) -> None:
        self._wrote = True
        self._inner.create("file", DATA)

    def _create_again(self) -> None:
        with _refused("a second create replaced the first: two attempts of a run could both commit"):
            self._inner.create("file", DATA[::-1])
        if "read" in self._good:
            _expect(self._inner.read("file"), DATA, "a refused create changed the file")

    def _read(self) -> None:
        store, name = self._find_file()
        data = store.read(name)
        if store is self._inner:
            _expect(data, DATA, "the store returned different bytes than were written")

    def _read_range(self) -> None:
        store, name = self._find_file()
        data = store.read(name, 2, 5)
        if store is self._inner:
            _expect(data, DATA[2:5], "the store returned different bytes than were asked for")

    def _look(self) -> None:
        store, name = self._find_file()
        modified, size_bytes = store.modified(name), store.size_bytes(name)
        if store is self._inner:
            _expect(size_bytes, len(DATA), "the store returned a different size than was written")
            self.clock_s = (modified - datetime.now(UTC)).total_seconds()

    def _list_after(self) -> None:
        names = ["file"] if "create" in self._good else []
        _expect(self._inner.list("", "a"), names, "the store listed different names than were created")
        _expect(self._inner.list("", "g"), [], "the store listed names that sort before the given one")

    def _replace(self) -> None:
        for data in (DATA, DATA[::-1]):
            self._inner.replace("replaced", data)
        if "read" in self._good:
            _expect(self._inner.read("replaced"), DATA[::-1], "a reader still gets the old bytes")

    def _upload(self) -> None:
        with self._inner.creating("large") as writer:
            writer.write(bytes(PART_BYTES + 1))
        _expect(self._inner.size_bytes("large"), PART_BYTES + 1, "the store wrote a different size than was sent")

    def _upload_again(self) -> None:
        message = "a second upload replaced the first: two attempts of a run could mix their checkpoints"
        with _refused(message), self._inner.creating("raced") as writer:
            writer.write(bytes(PART_BYTES + 1))
            self._inner.create("raced", DATA)
        if "read" in self._good:
            _expect(self._inner.read("raced", 0, len(DATA) + 1), DATA, "a refused upload changed the file")

    def _copy(self) -> None:
        if not self._inner.copy("large", "copied"):
            raise NotOffered("the storage can't copy objects: instead of a copy, a run uploads the bytes again")
        _expect(self._inner.size_bytes("copied"), PART_BYTES + 1, "the copy has a different size than the original")

    def _sweep(self) -> None:
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        if not self._rights.get("sweep"):  # the storage deletes unfinished uploads by itself, after a week
            self._inner.sweep(tomorrow)
            return
        unfinished = getattr(self._inner, "unfinished", self._inner.creating)
        with contextlib.suppress(_Unfinished), unfinished("unfinished"):
            if not self._inner.sweep(tomorrow):
                raise Misbehaved("an unfinished upload was not found, so it would never be deleted")
            raise _Unfinished

    def _delete_folder(self) -> None:
        self.store.delete_folder(self.name)
        _expect(self._inner.list(), [], "files are still there after the deletion")

    def _find_file(self) -> tuple[Store, str]:
        """Return a store and the name of a file in it: a trial's file or, if none was created, any run's ``run.json``.

        Raises:
            NotTried: no trial's file and no run exists.
        """
        if "create" in self._good:
            return self._inner, "file"
        if "list" in self._good:
            for name in self.store.list():
                with contextlib.suppress(HoldfastError):
                    if "run.json" in self.store.list(name):
                        return self.store, f"{name}/run.json"
        raise NotTried("no file could be created, and the store holds no run")


class _Unfinished(Exception):
    """The exception that leaves a write's block before the write is finished."""


@contextlib.contextmanager
def _refused(message: str) -> Iterator[None]:
    """Raise Misbehaved unless the block raises NameTaken."""
    try:
        yield
    except NameTaken:
        return
    raise Misbehaved(message)


def _expect(found: object, expected: object, message: str) -> None:
    if found != expected:
        raise Misbehaved(message)


def _list_missing(store: Store) -> list[Path]:
    """Return the folders on a local store's path that a first write would create, the innermost first."""
    folders = (store.root, *store.root.parents) if isinstance(store, LocalStore) else ()
    return [folder for folder in folders if not os.path.lexists(folder)]
