"""Near copies of a run's checkpoints: whole checkpoints on a disk or in memory of the node, which outlive its ranks.

A near folder is a cache: nothing in it counts for the run. A restore takes a part from it only if the part has the hash
in the commit. A checkpoint that only the near folder has is first copied to the store, and then adopted like any
checkpoint of dead ranks. So a near folder that is full, read-only, damaged, outdated or missing costs only a warning,
and time.

Several runs, attempts and ranks may share one near folder. Each run has a subfolder, named after the run, its URL and
its ``run.json``, with checkpoints in the same form as on the store.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.checkpoint.files import FileDamage
from holdfast.checkpoint.metadata import Saved, is_folder_name, read_metadata
from holdfast.checkpoint.peers import Alone, Peers
from holdfast.config import NearTier
from holdfast.errors import HoldfastError, RecordDamaged, StoreFull
from holdfast.journal import Commit, FileRecord
from holdfast.machine import faults
from holdfast.store import Store
from holdfast.store.contract import translate_errors
from holdfast.store.local import LocalStore

RUN_FOLDER = re.compile(r".+-[0-9a-f]{16}")
# Only the owner may write into a near folder, because a run may adopt checkpoints from it.
MODE = 0o700

log = logging.getLogger(__name__)


class Copy(NamedTuple):
    """A checkpoint of any run in a near folder, complete or incomplete. Its age is the age of its newest file."""

    modified: float
    path: Path
    size_bytes: int


class Near:
    """The near copies of one run: copies of its checkpoints in a folder on this node.

    Args:
        settings: the folder, and the largest number of bytes in it.
        folder: the run's folder on the store.
        name: the run's name.
    """

    def __init__(self, settings: NearTier, folder: Store, name: str) -> None:
        assert settings.folder is not None
        self.root = Path(settings.folder).expanduser().absolute()
        self._most_bytes, self._folder, self._name = settings.most_bytes, folder, name
        self._place = ""  # the name of the run's own folder
        self._problem: type[Exception] | None = None  # the error of the last save
        self._unsaid = ""  # the problem that was not reported yet

    def is_of(self, folder: Store) -> bool:
        """Return whether a folder on a store belongs to this run."""
        return folder.url == self._folder.url

    @property
    def place(self) -> Path:
        """Return the run's folder in the near folder."""
        if not self._place:
            # A run that was deleted and begun again has another run.json. A run with the same name on another store has
            # another URL.
            known = self._folder.url.encode() + self._folder.read("run.json")
            self._place = f"{self._name}-{hashlib.sha256(known).hexdigest()[:16]}"
        return self.root / self._place

    @property
    def store(self) -> Store:
        """Return `place` as a store whose writes fail if the folder is missing."""
        return LocalStore(str(self.place)).existing()

    # ---- writing

    def keep(self, size_bytes: int, write: Callable[[Store], Saved], peers: Peers | Alone) -> None:
        """Write a checkpoint into the near folder, and delete the oldest checkpoints to make room.

        Raise no error; see `take_problem`.

        Args:
            size_bytes: the total size of the checkpoint's parts.
            write: writes the checkpoint to a store, together with the other ranks.
            peers: the ranks that write the checkpoint together, each into the near folder of its own node.
        """
        try:
            peers.each(lambda: self._prepare(size_bytes))
            write(self.store)
            faults.reach("near-durable")
            self._problem = None
        except (HoldfastError, OSError) as error:
            if type(error) is not self._problem:
                self._unsaid = f"{error}; no copy is kept in the near folder"
            self._problem = type(error)

    def take_problem(self) -> str:
        """Return a message for the user that says why the last save failed, and forget the message.

        The text is empty if the save hasn't failed, if the previous save failed for the same reason, or if an earlier
        call has returned the message.
        """
        unsaid, self._unsaid = self._unsaid, ""
        return unsaid

    def _prepare(self, size_bytes: int) -> None:
        place = self.place
        with translate_errors(f"write to the near folder {self.root}"):
            # Don't create the folder's parents: if a disk isn't mounted, the copies would fill the disk that has the
            # mount point.
            for folder in (self.root, place):
                folder.mkdir(MODE, exist_ok=True)  # another rank may create the folder at the same moment
            self._make_room(size_bytes)

    def _make_room(self, size_bytes: int) -> None:
        """Delete the oldest checkpoints until the folder's limit and its disk have room for ``size_bytes`` bytes."""
        copies = sorted(self._list_copies())
        room = self._most_bytes - sum(each.size_bytes for each in copies)
        room = min(room, shutil.disk_usage(self.root).free)
        for oldest in copies:
            if room >= size_bytes or size_bytes > self._most_bytes:
                break
            shutil.rmtree(oldest.path, ignore_errors=True)
            room += 0 if oldest.path.exists() else oldest.size_bytes
        if room < size_bytes:
            raise StoreFull(
                f"{self.root} has {max(room, 0):,} bytes of free space, but a checkpoint needs {size_bytes:,}"
            )

    def _list_copies(self) -> Iterator[Copy]:
        """Yield the checkpoints of all runs. Skip files whose names Holdfast doesn't use: other programs wrote them."""
        for run in _list_folders(self.root):
            for folder in _list_folders(run.path) if RUN_FOLDER.fullmatch(run.name) else ():
                with contextlib.suppress(FileNotFoundError):  # another process has deleted the copy
                    if is_folder_name(folder.name):
                        yield _measure(Path(folder.path))

    # ---- reading

    def find(self, commit: Commit) -> tuple[list[str], str]:
        """Return the folders of `store` that may have copies of a commit's parts, and the damage of metadata that was
        found.

        A folder is returned if its name has the commit's step, and if its metadata has the commit's content id or is
        missing. The metadata is missing on a node whose ranks write only some of the parts.
        """
        found, problem = [], ""
        with contextlib.suppress(HoldfastError):
            for path in self.store.list():
                if is_folder_name(path) and path.partition(".")[0] == commit.path.partition(".")[0]:
                    try:
                        metadata = read_metadata(self.store, path)
                        if metadata is None or metadata.checkpoint_sha256 == commit.checkpoint_sha256:
                            found.append(path)
                    except RecordDamaged as error:
                        problem = f"near copy: {error}"
        return found, problem


class NearReader:
    """The near copies of one commit's checkpoint, for one restore. Several threads may read different parts.

    Attributes:
        store: the run's folder in the near folder.
        taken: the names of the parts that were read from a copy.
        problem: the damage of the last copy that couldn't be used; empty if there was none.
    """

    def __init__(self, near: Near, commit: Commit) -> None:
        self._copies, self.problem = near.find(commit)
        self.store = near.store if self._copies else None
        self.taken: list[str] = []

    def take(self, part: FileRecord, read: Callable[[Store, str, FileRecord], FileDamage | None]) -> str:
        """Read a part from an undamaged copy. Return the copy's folder; empty if there is no such copy.

        Damaged copies are deleted, so that no later restore tries to read them.

        Args:
            read: reads the whole part from a folder of a store, and returns the part's damage, if any.
        """
        for path in self._copies if self.store else ():
            assert self.store is not None
            try:
                damage = read(self.store, path, part)
                if damage is None:
                    self.taken.append(part.name)
                    return path
                if damage.found != FileDamage.missing(path, part).found:
                    self.problem = f"near copy: {damage}"
                    self.store.delete(f"{path}/{part.name}")
            except HoldfastError as error:
                self.problem = f"near copy: {error}"
        return ""


def _measure(folder: Path) -> Copy:
    found = [each.stat(follow_symlinks=False) for each in os.scandir(folder)]
    newest = max((each.st_mtime for each in found), default=folder.stat().st_mtime)
    return Copy(newest, folder, sum(each.st_size for each in found))


def _list_folders(folder: str | Path) -> "list[os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        return [each for each in entries if each.is_dir(follow_symlinks=False)]
