"""64-bit checksums of tensors, computed on the tensors' own devices in one pass.

Words of 8 bytes are added in rows of `ROW_WORDS`, modulo 2**64, and each row's sum is weighted by the row's position.
Integer addition is associative, so the sum has the same bits for any order of addition, on any device. For the same
reason, the sums of ranks that each hold some rows of a tensor add up to the checksum of the whole tensor. A checksum
finds and locates differences; only a content id proves equality.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from holdfast.state.tensor_forms import TensorForm, find_form, is_sharded, local_of

ROW_WORDS = 1024
# The choice that `count_by_place` has made.
_is_by_place = True
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
            torch.distributed.all_reduce(values)  # this sum wraps around at 2**64, as the sum in a single rank does
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
    if (form := find_form(tensor)) is None:
        return _weigh(_to_words(tensor), 0, tensor.nbytes)
    return sum(
        (_weigh(_to_words(rows, start), start, tensor.nbytes) for start, rows in _list_rows(form, tensor)),
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


def _list_rows(form: TensorForm, tensor: Any) -> Iterator[tuple[int, torch.Tensor]]:
    return form.list_rows(tensor, is_by_place=_is_by_place)


def _fill(tensor: Any, are_cut: bool) -> torch.Tensor:
    """Return a tensor's bytes, with zeros for the bytes that other ranks hold.

    Args:
        are_cut: True to read only sharded tensors, False to read only whole tensors. Tensors of the other kind become
            zeros.
    """
    form = find_form(tensor)
    if (form is not None) != are_cut:
        return torch.zeros(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
    if form is None:
        return _to_bytes(tensor)
    for start, rows in _list_rows(form, tensor):  # yields all rows at once, because the tensor is small
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
