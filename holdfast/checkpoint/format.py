"""The state as bytes: plain safetensors files, the same for equal states on every machine.

Nothing here knows torch: a tensor is a name, a dtype, a shape and a buffer. Every reader of the format can open them,
and nothing in them can be executed. `FORMAT.md` in the package is the promise.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

# Over 300 lines, barely: the two halves of one format, cutting and putting together.

import bisect
import ctypes
import functools
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from holdfast.canonical import dump_json
from holdfast.config import PART_BYTES
from holdfast.errors import CheckpointDamaged
from holdfast.store import Bytes

PAYLOAD = "checkpoint.safetensors"
PART = re.compile(r"checkpoint(-\d{5}-of-\d{5})?\.safetensors")

# A state is cut into so many parts, if they are neither smaller than this nor larger than asked for.
PARTS = 16
LEAST_PART_BYTES = 16 * 2**20
# What changes in every step (counters, random numbers, adapters) is small, and stays out of the parts of what may not
# change: what is less than this, or than a 64th of a part.
SMALL_BYTES = 2**16
SMALL_SHARE = 64

# safetensors writes several metadata keys in random order: one key, holding canonical JSON, keeps the bytes stable.
METADATA_KEY = "holdfast"
HEADER_METADATA = "__metadata__"  # no tensor's name
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class Source(Protocol):
    """Bytes that are copied from where they are when they are asked for.

    Attributes:
        address: where they are in this process's memory, in one piece; 0 where that is not so.
    """

    address: int

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> "Source": ...

    def in_memory(self) -> Bytes:
        """They themselves, or a copy."""

    def copy_to(self, target: memoryview, /) -> None:
        """Return when they are there."""


Piece = Bytes | Source


def in_memory(piece: Piece) -> Bytes:
    """Its bytes, copied if need be."""
    return piece if isinstance(piece, Bytes) else piece.in_memory()


def copy_pieces(pieces: Iterable[Piece], target: memoryview) -> None:
    """Their bytes are in the target, one after the other; other threads run meanwhile."""
    import numpy as np  # Python's own copies don't let them

    copy = np.frombuffer(target, np.uint8)
    start, position = copy.ctypes.data, 0
    for piece in pieces:
        end = position + len(piece)
        if end > len(target):
            raise ValueError(f"{len(target)} bytes are too few")
        if isinstance(piece, Bytes):
            copy[position:end] = np.frombuffer(piece, np.uint8)
        elif piece.address:
            ctypes.memmove(start + position, piece.address, end - position)
        else:
            piece.copy_to(target[position:end])
        position = end


class Tensor(NamedTuple):
    """A tensor's bytes, row-major and little-endian, in one piece or in several."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


@dataclass(frozen=True)
class Payload:
    """A state: tensors by name, and everything that is not a tensor as one JSON value."""

    tensors: Mapping[str, Tensor]
    tree: Any


@dataclass(frozen=True)
class Part:
    """One safetensors file of a payload, as pieces of memory."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


# ---- cutting


def cut(payload: Payload, part_bytes: int | None = PART_BYTES) -> list[Part]:
    """The payload's files. Where they are cut follows from names, dtypes and shapes, and from nothing else.

    A small state is one file. Of a larger one the first part has all that isn't a tensor, and the small tensors begin
    there; a tensor that is larger than a part is cut between rows, and goes on in the next part under the same name.

    Args:
        part_bytes: how much of the tensors a part holds at most (but for a single row that is larger); None for one
            file, whatever its size.
    """
    tensors = payload.tensors
    layouts = _lay_out(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()), part_bytes)
    parts = []
    for number, layout in enumerate(layouts, start=1):
        metadata = _member(HEADER_METADATA, {METADATA_KEY: dump_json(payload.tree).decode()}) if number == 1 else ""
        text = f"{{{','.join(filter(None, (layout.before, metadata, layout.after)))}}}".encode()
        text += b" " * (-len(text) % 8)
        pieces = (piece for rows in layout.rows for piece in rows.pieces_of(tensors[rows.name]))
        parts.append(Part(part_name(number, len(layouts)), (struct.pack("<Q", len(text)) + text, *pieces)))
    return parts


def part_name(number: int, parts: int) -> str:
    """``checkpoint-00002-of-00017.safetensors``; ``checkpoint.safetensors``, if it is the only one."""
    return f"checkpoint-{number:05d}-of-{parts:05d}.safetensors" if parts > 1 else PAYLOAD


def is_part(name: str) -> bool:
    """Whether a file of a checkpoint is one of the payload's."""
    return PART.fullmatch(name) is not None


def serialize(payload: Payload) -> Iterator[Bytes]:
    """The bytes of the payload as one file, in pieces. The same payload gives the same bytes, everywhere."""
    (part,) = cut(payload, None)
    return map(in_memory, part.pieces)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a tensor, or all of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int = 0  # of the tensor's bytes
    is_all: bool = True

    @functools.cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def pieces_of(self, tensor: Tensor) -> Sequence[Piece]:
        if self.is_all:
            return tensor.pieces
        (data,) = tensor.pieces
        data = memoryview(data) if isinstance(data, Bytes) else data
        return [data[self.first : self.first + self.size_bytes]]


@dataclass(frozen=True)
class _Layout:
    """What a part has of each tensor, and what its header says of them: what comes before the metadata, and after."""

    rows: Sequence[_Rows]
    before: str
    after: str


@functools.lru_cache(maxsize=4)  # the same at every save of a run
def _lay_out(tensors: tuple[tuple[str, str, tuple[int, ...]], ...], part_bytes: int | None) -> list[_Layout]:
    rows = [_Rows(*each) for each in tensors]
    total = sum(each.size_bytes for each in rows)
    limit = total if part_bytes is None else min(part_bytes, max(LEAST_PART_BYTES, -(-total // PARTS)))
    if total <= limit:
        return [_layout(_in_order(rows))]
    least = max(SMALL_BYTES, limit // SMALL_SHARE)
    small = [each for each in rows if each.size_bytes < least]
    large = [each for each in rows if each.size_bytes >= least]
    return [_layout(group) for group in (*(_fill(small, limit) or [[]]), *_fill(large, limit))]


def _in_order(rows: Iterable[_Rows]) -> list[_Rows]:
    """In order of falling item size, so that each is aligned for its dtype, then of name."""
    return sorted(rows, key=lambda each: (-ITEM_BYTES[each.dtype], each.name))


def _fill(tensors: list[_Rows], limit: int) -> list[list[_Rows]]:
    groups: list[list[_Rows]] = []
    room = 0
    for tensor in _in_order(tensors):
        for rows in _cut_rows(tensor, limit):
            if not groups or rows.size_bytes > room:
                groups.append([])
                room = limit
            groups[-1].append(rows)
            room -= rows.size_bytes
    return groups


def _cut_rows(tensor: _Rows, limit: int) -> Iterator[_Rows]:
    if tensor.size_bytes <= limit:
        yield tensor
        return
    count, *rest = tensor.shape
    row_bytes = tensor.size_bytes // count
    step = max(1, limit // row_bytes)
    for first in range(0, count, step):
        yield _Rows(
            tensor.name, tensor.dtype, (min(step, count - first), *rest), first * row_bytes, is_all=count <= step
        )


def _layout(rows: list[_Rows]) -> _Layout:
    members, end = dict[str, str](), 0
    for each in rows:
        start, end = end, end + each.size_bytes
        entry = {"data_offsets": [start, end], "dtype": each.dtype, "shape": each.shape}
        members[each.name] = _member(each.name, entry)
    names = sorted(members)
    position = bisect.bisect(names, HEADER_METADATA)
    return _Layout(rows, *(",".join(map(members.__getitem__, some)) for some in (names[:position], names[position:])))


def _member(name: str, value: Any) -> str:
    return f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"


# ---- putting together


def deserialize(files: Sequence[Bytes]) -> Payload:
    """What `cut` has cut, from its files in their order. The tensors are views of them.

    Raises:
        CheckpointDamaged: they aren't well-formed safetensors files of ours.
    """
    tree: Any = None
    tensors: dict[str, Tensor] = {}
    try:
        for number, file in enumerate(files):
            header, body = _split(memoryview(file))
            if number == 0:
                tree = json.loads(header.pop(HEADER_METADATA)[METADATA_KEY])
            for name, entry in header.items():
                rows = _tensor(name, entry, body)
                tensors[name] = _join(name, tensors[name], rows) if name in tensors else rows
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointDamaged(f"{PAYLOAD} is not a safetensors file of this format: {error}") from None
    return Payload(tensors, tree)


def _split(file: memoryview) -> tuple[dict[str, Any], memoryview]:
    (header_bytes,) = struct.unpack_from("<Q", file)
    if header_bytes > min(MAX_HEADER_BYTES, len(file) - 8):
        raise ValueError(f"its header claims {header_bytes} bytes")
    header: dict[str, Any] = json.loads(bytes(file[8 : 8 + header_bytes]))
    return header, file[8 + header_bytes :]


def _tensor(name: str, entry: dict[str, Any], body: memoryview) -> Tensor:
    start, end = entry["data_offsets"]
    shape = tuple(map(int, entry["shape"]))
    size_bytes = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
    if not 0 <= start <= end <= len(body) or end - start != size_bytes:
        raise ValueError(f"{name} lies outside the file")
    return Tensor(entry["dtype"], shape, (body[start:end],))


def _join(name: str, tensor: Tensor, more: Tensor) -> Tensor:
    if (tensor.dtype, tensor.shape[1:]) != (more.dtype, more.shape[1:]):
        raise ValueError(f"the rows of {name} don't fit together")
    return Tensor(tensor.dtype, (tensor.shape[0] + more.shape[0], *tensor.shape[1:]), (*tensor.pieces, *more.pieces))
