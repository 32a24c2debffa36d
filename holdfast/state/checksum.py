"""64-bit checksums of tensors, computed on the device that holds them, in one pass.

Words of 8 bytes are added in rows of `ROW_WORDS`, modulo 2**64; each row's sum is weighted by its position. Integer
addition is associative, so any order of addition gives the same bits on any device. A checksum finds and locates
differences; only a content id proves equality.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

ROW_WORDS = 1024
WORD_BYTES = 8
# Odd, so that multiplying loses no bit of a row's sum. Source: the increment of SplitMix64 (Steele, Lea, Flood, 2014).
WEIGHT = 0x9E3779B97F4A7C15 - 2**64


def checksum(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum in [0, 2**64) for each tensor. Synchronize once for each device, not once for each tensor."""
    sums = [_sum(tensor.detach()) for tensor in tensors]
    found = [0] * len(sums)
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            found[place] = value % 2**64
    return found


def checksum_together(tensors: Sequence[torch.Tensor]) -> int:
    """Return one checksum for all tensors in their order.

    Small tensors are joined first: one call for each of them would cost more than their bytes.
    """
    found = 0
    for device in sorted({tensor.device for tensor in tensors}, key=str):
        small = [tensor for tensor in tensors if tensor.device == device and tensor.nbytes <= 2**16]
        joined = [torch.cat([_to_bytes(tensor.detach()) for tensor in small])] if small else []
        large = [tensor for tensor in tensors if tensor.device == device and tensor.nbytes > 2**16]
        for value in checksum([*joined, *large]):
            found = (found * 31 + value) % 2**64
    return found


def checksum_value(value: bytes) -> int:
    """Return a checksum in [0, 2**64) of bytes that are not a tensor's."""
    return int.from_bytes(hashlib.sha256(value).digest()[:8], "little")


def _sum(tensor: torch.Tensor) -> Any:
    words = _to_words(tensor)
    rows = len(words) // ROW_WORDS
    sums = torch.cat([words[: rows * ROW_WORDS].view(rows, ROW_WORDS).sum(1), words[rows * ROW_WORDS :]])
    weights = torch.arange(1, len(sums) + 1, device=words.device) * WEIGHT | 1
    return (sums * weights).sum() + tensor.nbytes


def _to_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as int64, padded with zeros; a view if size and alignment allow it."""
    data = _to_bytes(tensor)
    missing = -len(data) % WORD_BYTES
    if missing or data.storage_offset() % WORD_BYTES:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64)


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
