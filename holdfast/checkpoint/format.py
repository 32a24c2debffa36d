"""The format of a state: plain safetensors files, with equal bytes for equal states on every machine.

This module doesn't use torch: a tensor is a name, a dtype, a shape and a buffer. Every safetensors reader can open the
files, and nothing in them can be executed. `FORMAT.md` in the package specifies the format.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import bisect
import functools
import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.payload import Payload, Piece, Tensor, in_memory
from holdfast.config import PART_BYTES
from holdfast.errors import CheckpointDamaged
from holdfast.provenance.canonical import dump_json
from holdfast.store import Bytes

PAYLOAD = "checkpoint.safetensors"
PART = re.compile(r"checkpoint(-\d{5}-of-\d{5})?\.safetensors")

# A large state is cut into about PARTS parts, or into fewer so that no part is smaller than LEAST_PART_BYTES.
PARTS = 16
LEAST_PART_BYTES = 16 * 2**20
# Small tensors (counters, generator states, adapters) change at every step. They are stored in separate parts, so that
# a part of large frozen tensors stays the same from save to save. Small means below SMALL_BYTES, or below a 64th of a
# part.
SMALL_BYTES = 2**16
SMALL_SHARE = 64

# safetensors writes several metadata keys in random order. One key that holds canonical JSON keeps the bytes stable.
METADATA_KEY = "holdfast"
HEADER_METADATA = "__metadata__"  # reserved by safetensors: a tensor can't have this name
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "F4": 0.5,
}  # fmt: skip


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Return the size of a tensor in bytes."""
    return int(math.prod(shape) * ITEM_BYTES[dtype])


@dataclass(frozen=True)
class Part:
    """One safetensors file of a payload: its name, and its bytes in pieces."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


# ---- cutting


def cut(payload: Payload, part_bytes: int | None = PART_BYTES) -> list[Part]:
    """Cut a payload into files. The cut depends only on the tensors' names, dtypes and shapes.

    A small state becomes one file. In a larger state, the first part contains all values that aren't tensors, and the
    first small tensors. A tensor larger than a part is cut between rows, and continues in the next part under the same
    name.

    Args:
        part_bytes: the largest number of bytes of tensors in a part, unless a single row is larger; None for one file
            of any size.
    """
    parts = []
    layouts = _lay_out(_describe(payload.tensors), part_bytes)
    for number, layout in enumerate(layouts, start=1):
        metadata = {METADATA_KEY: dump_json(payload.tree).decode()} if number == 1 else None
        pieces = _make_pieces(layout, payload.tensors, metadata)
        parts.append(Part(part_name(number, len(layouts)), pieces))
    return parts


def _describe(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def _make_pieces(
    layout: "_Layout", tensors: Mapping[str, Tensor], metadata: dict[str, str] | None
) -> tuple[Piece, ...]:
    """Return the bytes of one safetensors file: its header, and its tensors' rows."""
    member = _member(HEADER_METADATA, metadata) if metadata else ""
    text = f"{{{','.join(filter(None, (layout.before, member, layout.after)))}}}".encode()
    text += b" " * (-len(text) % 8)
    pieces = (piece for rows in layout.rows for piece in rows.pieces_of(tensors[rows.name]))
    return struct.pack("<Q", len(text)) + text, *pieces


def part_name(number: int, parts: int) -> str:
    """Return a part's file name: ``checkpoint-00002-of-00017.safetensors``; for a single part `PAYLOAD`."""
    return f"checkpoint-{number:05d}-of-{parts:05d}.safetensors" if parts > 1 else PAYLOAD


def is_part(name: str) -> bool:
    """Return whether a file of a checkpoint is a part of the payload."""
    return PART.fullmatch(name) is not None


def serialize(payload: Payload) -> Iterator[Bytes]:
    """Return the bytes of a payload as one file, in pieces. Equal payloads give equal bytes on every machine."""
    (part,) = cut(payload, None)
    return map(in_memory, part.pieces)


def digest_payload(payload: Payload) -> str:
    """Return the SHA-256 (hex) of the bytes that `serialize` returns."""
    sha256 = hashlib.sha256()
    for piece in serialize(payload):
        sha256.update(piece)
    return sha256.hexdigest()


def serialize_tensors(tensors: Mapping[str, Tensor]) -> Iterator[Bytes]:
    """Return the pieces of a safetensors file that has only tensors. The file's metadata is ``{"format": "pt"}``."""
    (layout,) = _lay_out(_describe(tensors), None)
    return map(in_memory, _make_pieces(layout, tensors, {"format": "pt"}))


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of a tensor, or all of its rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int = 0  # offset of the first row in the tensor's bytes
    is_all: bool = True

    @functools.cached_property
    def size_bytes(self) -> int:
        return size_of(self.dtype, self.shape)

    def pieces_of(self, tensor: Tensor) -> Sequence[Piece]:
        if self.is_all:
            return tensor.pieces
        (data,) = tensor.pieces
        data = memoryview(data) if isinstance(data, Bytes) else data
        return [data[self.first : self.first + self.size_bytes]]


@dataclass(frozen=True)
class _Layout:
    """The content of a part: its rows, and the text of its header before and after the metadata."""

    rows: Sequence[_Rows]
    before: str
    after: str


@functools.lru_cache(maxsize=4)  # cached, because a run has the same layout at every save
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
    """Return the rows sorted by item size, largest first, then by name. In this order every tensor is aligned."""
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
    least = 1 if rest or ITEM_BYTES[tensor.dtype] >= 1 else 2  # the minimum number of rows that fill whole bytes
    step = max(1, limit // size_of(tensor.dtype, (least, *rest))) * least
    for first in range(0, count, step):
        shape, start = (min(step, count - first), *rest), size_of(tensor.dtype, (first, *rest))
        yield _Rows(tensor.name, tensor.dtype, shape, start, is_all=count <= step)


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


# ---- joining


def deserialize(files: Sequence[Bytes]) -> Payload:
    """Join the files that `cut` made, in their order, into a payload. The tensors are views of the files' memory.

    Raises:
        CheckpointDamaged: a file is not well-formed safetensors of this format.
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
        raise CheckpointDamaged(f"{PAYLOAD} is not a safetensors file as Holdfast writes it: {error}") from None
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
    size_bytes = size_of(entry["dtype"], shape)
    if not 0 <= start <= end <= len(body) or end - start != size_bytes:
        raise ValueError(f"{name} lies outside the file")
    return Tensor(entry["dtype"], shape, (body[start:end],))


def _join(name: str, tensor: Tensor, more: Tensor) -> Tensor:
    if (tensor.dtype, tensor.shape[1:]) != (more.dtype, more.shape[1:]):
        raise ValueError(f"the parts have rows of {name} with different dtypes or shapes")
    return Tensor(tensor.dtype, (tensor.shape[0] + more.shape[0], *tensor.shape[1:]), (*tensor.pieces, *more.pieces))
