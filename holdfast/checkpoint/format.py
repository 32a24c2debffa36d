"""The state as bytes: a plain safetensors file, the same for equal states on every machine.

Nothing here knows torch: a tensor is a name, a dtype, a shape and a buffer. Every reader of the format can open it, and
nothing in it can be executed. `FORMAT.md` in the package is the promise.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import rfc8785

from holdfast.errors import CheckpointDamaged
from holdfast.store import Bytes

PAYLOAD = "checkpoint.safetensors"

# safetensors writes several metadata keys in random order: one key, holding canonical JSON, keeps the bytes stable.
METADATA_KEY = "holdfast"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor's bytes, row-major and little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True)
class Payload:
    """What `PAYLOAD` holds: tensors by name, and everything that is not a tensor as one JSON value."""

    tensors: Mapping[str, Tensor]
    tree: Any


def serialize(payload: Payload) -> Iterator[Bytes]:
    """The bytes of a safetensors file, in pieces. The same payload gives the same bytes, everywhere.

    Tensors lie in order of falling item size, then of name, so that each is aligned for its dtype.
    """
    order = sorted(payload.tensors, key=lambda name: (-ITEM_BYTES[payload.tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: rfc8785.dumps(payload.tree).decode()}}
    end = 0
    for name in order:
        tensor = payload.tensors[name]
        start, end = end, end + len(memoryview(tensor.data))
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield payload.tensors[name].data


def deserialize(buffer: bytearray) -> Payload:
    """What `serialize` wrote. The tensors are views of the buffer.

    Raises:
        CheckpointDamaged: it is not a well-formed safetensors file of ours.
    """
    view = memoryview(buffer)
    try:
        (header_bytes,) = struct.unpack_from("<Q", buffer)
        if header_bytes > min(MAX_HEADER_BYTES, len(buffer) - 8):
            raise ValueError(f"its header claims {header_bytes} bytes")
        header = json.loads(bytes(view[8 : 8 + header_bytes]))
        tree = json.loads(header.pop("__metadata__")[METADATA_KEY])
        body = view[8 + header_bytes :]
        tensors = {name: _tensor(name, entry, body) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{PAYLOAD} is not a safetensors file of this format: {error}") from None
    return Payload(tensors, tree)


def _tensor(name: str, entry: dict[str, Any], body: memoryview) -> Tensor:
    start, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    size_bytes = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
    if not 0 <= start <= end <= len(body) or end - start != size_bytes:
        raise ValueError(f"{name} lies outside the file")
    return Tensor(entry["dtype"], shape, body[start:end])
