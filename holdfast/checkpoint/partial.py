"""Reading a checkpoint part by part, for ranks that each need some rows of it."""

import json
import math
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.checkpoint.files import damage_error
from holdfast.checkpoint.format import HEADER_METADATA, ITEM_BYTES, MAX_HEADER_BYTES, METADATA_KEY
from holdfast.checkpoint.verifying import check_others, fill_part
from holdfast.errors import CheckpointDamaged, NameMissing
from holdfast.journal import Commit, FileRecord
from holdfast.store import Store


class Rows(NamedTuple):
    """Consecutive rows of a tensor in a part, or all of its rows.

    Attributes:
        position: the first byte in the part.
        shape: the shape of these rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    position: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    """The header of a part: its rows, and the state's values that are no tensors, if it is the first part."""

    rows: tuple[Rows, ...]
    tree: Any


def read_headers(folder: Store, commit: Commit, parts: Iterable[FileRecord]) -> dict[str, Header]:
    """Read the headers of some of a commit's parts, by the part's name. Nothing is verified yet but sizes.

    Raises:
        CheckpointDamaged: a part is missing, has another size, or isn't well-formed.
    """
    parts = list(parts)
    check_others(folder, commit, parts)
    return {part.name: _read_header(folder, commit, part) for part in parts}


def _read_header(folder: Store, commit: Commit, part: FileRecord) -> Header:
    path = f"{commit.path}/{part.name}"
    try:
        (header_bytes,) = struct.unpack("<Q", folder.read(path, 0, 8))
        begin = 8 + min(header_bytes, MAX_HEADER_BYTES)
        header = json.loads(folder.read(path, 8, begin))
        metadata = header.pop(HEADER_METADATA, None)
        rows = tuple(_read_rows(name, entry, begin, part.size_bytes) for name, entry in header.items())
        return Header(rows, json.loads(metadata[METADATA_KEY]) if metadata else None)
    except NameMissing:  # deleted since its size was read
        raise CheckpointDamaged(f"{path} is missing") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not a safetensors file of this format: {error}") from None


def _read_rows(name: str, entry: dict[str, Any], begin: int, file_bytes: int) -> Rows:
    start, end = entry["data_offsets"]
    rows = Rows(name, entry["dtype"], tuple(map(int, entry["shape"])), begin + start)
    if not 0 <= start <= end <= file_bytes - begin or end - start != rows.size_bytes:
        raise ValueError(f"{name} lies outside the file")
    return rows


def read_part(folder: Store, commit: Commit, part: FileRecord, image: memoryview) -> None:
    """Read a part into its image, and verify while reading that it has the hash in the commit.

    Raises:
        CheckpointDamaged: it has another hash.
    """
    with ThreadPoolExecutor(1, "read") as reader:
        damage = fill_part(folder, commit.path, {part: image}, reader, part)
    if damage is not None:
        raise damage_error(commit, [damage])
