"""The parts of a checkpoint that a rank writes."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from holdfast.journal import FileRecord


@dataclass(frozen=True)
class Written:
    """A part of the last checkpoint.

    Attributes:
        path: the checkpoint's folder.
        sharing: the number of checkpoints that share this file.
        is_lasting: whether the part was the same in the last two checkpoints.
    """

    record: FileRecord
    path: str
    sharing: int
    is_lasting: bool


@dataclass
class File:
    """A part that is being written.

    Attributes:
        record: a future with the size and hash of the part. There is one future for all folders to which the part is
            written, so that the part is hashed once.
        last: the same part in the last checkpoint; None if there is none.
        shared_by: see `Saver`.
    """

    name: str
    record: "Future[FileRecord]"
    last: Written | None
    shared_by: int
    is_copied: bool = False

    def may_be_copied(self) -> bool:
        """Return whether the store may copy the part from the last checkpoint.

        A copy has to wait until the part is hashed, so copying saves time only for parts that rarely change.
        """
        return self.last is not None and self.last.is_lasting and self.last.sharing < self.shared_by

    def written(self, path: str) -> Written:
        """Return this part as written to the folder ``path``. The next save compares its own part with the result."""
        record, last = self.record.result(), self.last
        sharing = last.sharing + 1 if last and self.is_copied else 1
        return Written(record, path, sharing, is_lasting=last is not None and last.record == record)


class Writing(Protocol):
    """The files of a checkpoint that this rank writes.

    Attributes:
        files: the parts that this rank owns.
    """

    files: Sequence[File]

    def write(self, path: str) -> list[FileRecord]:
        """Write the files to a folder durably. Return the records of the files other than parts.

        The first part gets its name before all other files, so that only one of two writers gets the folder.

        Raises:
            NameTaken: another writer's file has the name of one of these files.
        """
