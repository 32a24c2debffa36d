"""Digests of a batch's values, cheap enough for every step."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.state.slots import read_attributes, read_slots

# Data of more bytes is summed, and only the sums are hashed: SHA-256 reads 0.6 GB/s, and summing is ten times as fast.
# So a batch of 32 images of 224 x 224 takes 3 ms instead of 30.
HASHED_BYTES = 2**18
ROW_WORDS = 1024

DEEPEST = 8

# The types whose ``repr`` shows the whole value.
SHOWN = (bool, int, float, complex, str, bytes, type(None))


def digest_content(batch: Any) -> str:
    """Return a digest (16 hex characters) of a batch's values, in order. The device of a tensor doesn't count."""
    sha256 = hashlib.sha256()
    _add(batch, sha256)
    return sha256.hexdigest()[:16]


def combine(names: list[str]) -> str:
    """Combine the names of several micro-batches into one name of the same form, ``indices-content`` or ``content``.

    In the first form, the digests of the indices and of the contents are combined separately.
    """
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split("-") for name in names), strict=True)
    return "-".join(hashlib.sha256("".join(column).encode()).hexdigest()[:16] for column in columns)


def _add(value: Any, sha256: Any, depth: int = 0) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(value, sha256)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            _add_bytes(np.ascontiguousarray(value).reshape(-1).view(np.uint8), sha256)
        else:
            _add(value.tolist(), sha256, depth + 1)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            sha256.update(str(key).encode())
            _add(value[key], sha256, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(item, sha256, depth + 1)
    elif isinstance(value, SHOWN) or not (hasattr(value, "__dict__") or read_slots(value)):
        sha256.update(repr(value).encode())
    else:  # an object's repr may show the object's address, or shorten long contents
        sha256.update(type(value).__qualname__.encode())
        if depth < DEEPEST:  # bounded, because an object may refer to itself
            _add(read_attributes(value), sha256, depth + 1)


def _add_tensor(tensor: torch.Tensor, sha256: Any) -> None:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.numel():
        _add_bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), sha256)


def _add_bytes(data: np.ndarray[Any, np.dtype[np.uint8]], sha256: Any) -> None:
    if data.nbytes <= HASHED_BYTES:
        sha256.update(data)
        return
    # If a word of 8 bytes changes, the sums of its row and its column change. If words or rows are swapped, some sums
    # change, too.
    whole = data.nbytes // (8 * ROW_WORDS) * 8 * ROW_WORDS
    words = data[:whole].view(np.uint64).reshape(-1, ROW_WORDS)
    for axis in (0, 1):
        sha256.update(words.sum(axis, dtype=np.uint64).tobytes())
    sha256.update(data[whole:])
    sha256.update(str(data.nbytes).encode())
