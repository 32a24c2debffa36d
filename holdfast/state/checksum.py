"""64-bit checksums of tensors, computed on the tensors' own devices in one pass.

Words of 8 bytes are added in rows of `ROW_WORDS`, modulo 2**64, and each row's sum is weighted by the row's position.
Integer addition is associative, so any order of addition gives the same bits on any device. For the same reason, the
sums of ranks that each hold some rows of a tensor add up to the checksum of the whole tensor. A checksum finds and
locates differences; only a content id proves equality.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from holdfast.state.sharded import is_sharded, list_regions, local_of

ROW_WORDS = 1024
# The choice that `count_by_place` has made.
_is_by_place = True
# A rank that holds only a part of each row pads its rows with zeros to full width. It pads at most this number of bytes
# at a time.
PADDED_BYTES = 2**24
WORD_BYTES = 8
# The factor of the rows' weights. It is odd, so that the multiplication loses no bit of a row's sum. Source: SplitMix64
# (Steele, Lea, Flood, 2014).
WEIGHT = 0x9E3779B97F4A7C15 - 2**64


def checksum(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum in [0, 2**64) for each tensor. Wait for each device only once.

    For a sharded tensor, return the checksum of the whole tensor. If a tensor is sharded, all ranks call this together.
    """
    sums = _read([(_sum(tensor.detach()), is_sharded(tensor)) for tensor in tensors])
    return [(each + tensor.nbytes) % 2**64 for each, tensor in zip(sums, tensors, strict=True)]


def checksum_together(tensors: Sequence[torch.Tensor]) -> int:
    """Return one checksum for all tensors in their order, whole or sharded; see `checksum`.

    Small tensors are joined first, because one kernel call for each of them would cost more than reading their bytes.
    """
    found = 0
    for device in sorted({tensor.device for tensor in tensors}, key=str):
        own = [tensor.detach() for tensor in tensors if tensor.device == device]
        small = [tensor for tensor in own if tensor.nbytes <= 2**16]
        joined = [
            (_sum(torch.cat([_fill(tensor, are_cut) for tensor in small])), are_cut)
            for are_cut in sorted({is_sharded(tensor) for tensor in small})
        ]
        size = sum(tensor.nbytes for tensor in small)
        values = [(sum(_read(joined)) + size) % 2**64] if small else []
        for value in (*values, *checksum([tensor for tensor in own if tensor.nbytes > 2**16])):
            found = (found * 31 + value) % 2**64
    return found


def begin_checksum(tensor: torch.Tensor) -> Callable[[], int]:
    """Begin to compute a whole tensor's checksum. Return a function that waits for the device and returns the checksum.

    The caller may change the tensor as soon as this returns, if the change is queued on the same CUDA stream.
    """
    value, size = _sum(tensor.detach()), tensor.nbytes
    return lambda: (int(value) + size) % 2**64


def checksum_value(value: bytes) -> int:
    """Return a checksum in [0, 2**64) of bytes other than a tensor's."""
    return int.from_bytes(hashlib.sha256(value).digest()[:8], "little")


def join_checksums(checksums: Sequence[int | None]) -> str:
    """Combine the checksums of a model's gradients, in the order of its parameters, into 16 hex characters."""
    return f"{checksum_value(repr(list(checksums)).encode()):016x}"


def _read(sums: Sequence[tuple[torch.Tensor, bool]]) -> list[int]:
    """Return the value of each pair's scalar tensor. If the pair's flag is True, sum the value over all ranks."""
    found = [0] * len(sums)
    for kind in dict.fromkeys((value.device, are_cut) for value, are_cut in sums):
        places = [place for place, (value, are_cut) in enumerate(sums) if (value.device, are_cut) == kind]
        values = torch.stack([sums[place][0] for place in places])
        if kind[1]:
            torch.distributed.all_reduce(values)  # wraps around at 2**64, as the sum in a single rank does
        for place, value in zip(places, values.tolist(), strict=True):
            found[place] = value
    return found


def count_by_place(is_by_place: bool) -> None:
    """Choose how this process computes the checksum of a tensor of which each rank holds only a part of each row.

    Tensor parallelism cuts tensors in this way.

    Args:
        is_by_place: True to compute the checksum of the whole tensor. It is equal on any number of ranks, as virtual
            ranks require. False to weight each rank's part as if the part were consecutive, as versions did before
            virtual ranks trained on meshes. Checkpoints and trails of those versions contain this checksum.
    """
    global _is_by_place
    _is_by_place = is_by_place


def _sum(tensor: Any) -> torch.Tensor:
    """Return the weighted sum of a tensor's words, a scalar int64. For a sharded tensor, sum this rank's words only."""
    if not is_sharded(tensor):
        return _weigh(_to_words(tensor), 0, tensor.nbytes)
    return sum(
        (_weigh(_to_words(rows, start), start, tensor.nbytes) for start, rows in _list_rows(tensor)),
        torch.zeros((), dtype=torch.int64, device=local_of(tensor).device),
    )


def _weigh(words: torch.Tensor, start: int, size_bytes: int) -> torch.Tensor:
    """Return the sum of words, in which each row's sum is weighted by the row's position.

    Args:
        words: consecutive words of a tensor. The first word contains the tensor's byte ``start``.
        size_bytes: the size of the whole tensor. Each word after the last full row counts as a separate row.
    """
    first, rows = start // WORD_BYTES, -(-size_bytes // WORD_BYTES) // ROW_WORDS
    in_rows = max(0, min(len(words), rows * ROW_WORDS - first))
    head = min(-first % ROW_WORDS, in_rows)  # the words before the first whole row
    full = (in_rows - head) // ROW_WORDS
    pieces = [
        words[:head].sum()[None] if head else words[:0],
        words[head : head + full * ROW_WORDS].view(full, ROW_WORDS).sum(1),
        words[head + full * ROW_WORDS : in_rows].sum()[None] if head + full * ROW_WORDS < in_rows else words[:0],
        words[in_rows:],
    ]
    sums = torch.cat(pieces)
    place = min(first, rows * ROW_WORDS) // ROW_WORDS + max(0, first - rows * ROW_WORDS)
    weights = torch.arange(place + 1, place + 1 + len(sums), device=words.device) * WEIGHT | 1
    return (sums * weights).sum()


def _own_rows(tensor: Any) -> torch.Tensor:
    """Return this rank's region of a sharded tensor; empty if a rank with a lower number holds the same region.

    If the tensor's mesh has only some of the ranks, the other ranks hold the same regions on other meshes. Then return
    a region only on the mesh that contains rank 0, so that no region is counted twice.
    """
    regions, rank = list_regions(tensor), torch.distributed.get_rank()
    is_first = not any(other < rank and region == regions[rank] for other, region in regions.items())
    is_first = is_first and (0 in regions or not _is_by_place)
    return local_of(tensor) if is_first else local_of(tensor).new_empty(0)


def _list_rows(tensor: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield pairs of an offset and whole rows of a sharded tensor. The offset, in bytes, is that of the first row.

    If this rank holds only a part of each row, as with tensor parallelism, the other parts are filled with zeros, and a
    few rows are yielded at a time. If a rank with a lower number holds the same region, nothing is yielded.
    """
    own, region = _own_rows(tensor), list_regions(tensor)[torch.distributed.get_rank()]
    if not own.numel():
        return
    row = math.prod(tensor.shape[1:])
    if region.shape[1:] == tensor.shape[1:] or not _is_by_place:
        first = sum(index * math.prod(tensor.shape[place + 1 :]) for place, index in enumerate(region.offset))
        yield first * tensor.itemsize, own
        return
    start = region.offset[0] * row * tensor.itemsize
    missing = [
        size for first, count, whole in zip(region.offset, region.shape, tensor.shape, strict=True)
        for size in (first, whole - first - count)
    ]  # fmt: skip
    # `pad` takes the widths from the last dimension to the first. The first dimension isn't padded.
    padding = [size for place in range(len(missing) - 2, 0, -2) for size in missing[place : place + 2]]
    data = own.contiguous().view(torch.uint8).view(*own.shape, tensor.itemsize)
    for rows in torch.split(data, max(1, PADDED_BYTES // (row * tensor.itemsize))):
        yield start, (padded := torch.nn.functional.pad(rows, [0, 0, *padding]))
        start += padded.numel()


def _fill(tensor: Any, are_cut: bool) -> torch.Tensor:
    """Return a tensor's bytes, with zeros for the bytes that other ranks hold.

    Args:
        are_cut: True to read only sharded tensors, False to read only whole tensors. Tensors of the other kind become
            zeros.
    """
    if is_sharded(tensor) != are_cut:
        return torch.zeros(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
    if not are_cut:
        return _to_bytes(tensor)
    for start, rows in _list_rows(tensor):  # yields all rows at once, because the tensor is small
        own = _to_bytes(rows)
        return torch.nn.functional.pad(own, (start, tensor.nbytes - start - len(own)))
    return torch.zeros(tensor.nbytes, dtype=torch.uint8, device=local_of(tensor).device)


def _to_words(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the tensor's bytes as int64, padded with zeros; a view if size and alignment allow a view.

    Args:
        start: the offset of the first byte in a larger tensor. The words begin at multiples of 8 bytes in the larger
            tensor.
    """
    data = _to_bytes(tensor)
    before = start % WORD_BYTES
    after = -(before + len(data)) % WORD_BYTES
    if before or after or data.storage_offset() % WORD_BYTES:
        data = torch.cat([data.new_zeros(before), data, data.new_zeros(after)])
    return data.view(torch.int64)


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
