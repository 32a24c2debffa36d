"""The headers of a checkpoint's parts: which rows of which tensors a part contains."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.checkpoint.format import HEADER_METADATA, MAX_HEADER_BYTES, METADATA_KEY, size_of
from holdfast.checkpoint.progress import ENDED_EPOCH
from holdfast.checkpoint.verifying import check_others, find_parts
from holdfast.errors import CheckpointDamaged, NameMissing
from holdfast.journal import Commit, FileRecord
from holdfast.store import Store


class Rows(NamedTuple):
    """Consecutive rows of a tensor in a part, or all of its rows.

    Attributes:
        position: the offset of the first byte in the part.
        shape: the shape of these rows together.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    position: int

    @property
    def size_bytes(self) -> int:
        return size_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Header:
    """The header of a part: its rows; in the first part also the state's values that aren't tensors."""

    rows: tuple[Rows, ...]
    tree: Any


def read_headers(folder: Store, commit: Commit, parts: Iterable[FileRecord]) -> dict[str, Header]:
    """Return the headers of some of a commit's parts, by the part's name. Verify the parts' sizes, not their hashes.

    Raises:
        CheckpointDamaged: a part is missing, has a different size, or isn't well-formed.
    """
    parts = list(parts)
    check_others(folder, commit, parts)
    return {part.name: _read_header(folder, commit, part) for part in parts}


def read_ended_epoch(folder: Store, commit: Commit) -> bool | None:
    """Return whether a loop's code at an epoch's end had run before the save; None if the state can't be read."""
    try:
        first, *_ = find_parts(commit)
        return bool(read_headers(folder, commit, [first])[first.name].tree["progress"].get(ENDED_EPOCH))
    except (CheckpointDamaged, NameMissing, LookupError, TypeError):
        return None


def _read_header(folder: Store, commit: Commit, part: FileRecord) -> Header:
    path = f"{commit.path}/{part.name}"
    try:
        (header_bytes,) = struct.unpack("<Q", folder.read(path, 0, 8))
        begin = 8 + min(header_bytes, MAX_HEADER_BYTES)
        header = json.loads(folder.read(path, 8, begin))
        metadata = header.pop(HEADER_METADATA, None)
        rows = tuple(_read_rows(name, entry, begin, part.size_bytes) for name, entry in header.items())
        return Header(rows, json.loads(metadata[METADATA_KEY]) if metadata else None)
    except NameMissing:  # the part was deleted after its size was read
        raise CheckpointDamaged(f"{path} is missing") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not a safetensors file as Holdfast writes it: {error}") from None


def _read_rows(name: str, entry: dict[str, Any], begin: int, file_bytes: int) -> Rows:
    start, end = entry["data_offsets"]
    rows = Rows(name, entry["dtype"], tuple(map(int, entry["shape"])), begin + start)
    if not 0 <= start <= end <= file_bytes - begin or end - start != rows.size_bytes:
        raise ValueError(f"{name} lies outside the file")
    return rows
