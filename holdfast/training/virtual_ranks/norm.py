"""The norm of a gradient in a fixed order: the same bits for whole tensors and for tensors that are cut by rows."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed

from holdfast.state import is_sharded
from holdfast.state.sharded import TensorHolders, find_holders, list_alike, local_of
from holdfast.training.virtual_ranks.buckets import pack_alike
from holdfast.training.virtual_ranks.tree import sum_columns

# The most numbers that are squared at once: on a CPU so few that they fit into its caches, on a GPU more, so that fewer
# kernels are launched.
MOST_NUMBERS = 2**20
MOST_ELSEWHERE = 2**24


def take_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of some gradients, a scalar: float64 if any of them has double precision, else float32.

    The squares in each row (an index of the first dimension) are added first, in an order that follows from the row's
    length alone. Each rank sums its own rows. Then all ranks add the sums of all rows. Data ranks cut no row; tensor
    parallelism may cut each row into parts, which count as rows. Of the ranks that hold the same rows one counts.
    """
    if not gradients:
        return torch.zeros(())
    dtype = torch.float64 if any(each.dtype in (torch.float64, torch.complex128) for each in gradients) else torch.float
    are_cut = any(map(is_sharded, gradients))
    *firsts, total = itertools.accumulate((_count_rows(each) * _count_parts(each) for each in gradients), initial=0)
    sums = torch.zeros(1, total, dtype=dtype, device=gradients[0].device)
    most = MOST_NUMBERS if sums.device.type == "cpu" else MOST_ELSEWHERE
    pieces = [
        (slice(first + _find_first(each) + start * (parts := _count_parts(each)), None, parts), piece)
        for first, each in zip(firsts, gradients, strict=True)
        if not are_cut or _is_counted(each)
        for start, piece in _cut(_to_rows(each), most)
    ]
    for group in pack_alike(pieces, _describe_kind, lambda each: each[1].numel(), most):
        found = [piece.to(dtype) for _, piece in group]
        squares = found[0].square() if len(found) == 1 else torch.cat(found).square_()
        ends = torch.split(sum_columns(squares), [len(each) for each in found])
        for (places, _), own in zip(group, ends, strict=True):
            sums[0, places][: len(own)] = own
    if are_cut:
        distributed.all_reduce(sums)  # exact: for each row all ranks but one have a zero
    return sum_columns(sums)[0].sqrt()


def clip_to(gradients: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients down to a norm of at most ``limit``, as torch's ``clip_grad_norm_`` does."""
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for each in gradients:
        (local_of(each) if is_sharded(each) else each).mul_(scale.to(each.device))


def _count_rows(gradient: Tensor) -> int:
    return len(gradient) if gradient.dim() else 1


def _count_parts(gradient: Tensor) -> int:
    """Return the number of parts into which a gradient's rows are cut."""
    return len(_list_columns(find_holders(gradient))) if is_sharded(gradient) else 1


def _find_first(gradient: Tensor) -> int:
    """Return the place of the first sum of this rank's: each row has a place for each of its parts."""
    if not is_sharded(gradient) or not local_of(gradient).numel():
        return 0
    holders = find_holders(gradient)
    columns = _list_columns(holders)
    row, *column = holders.regions[distributed.get_rank()].offset or (0,)
    return row * len(columns) + columns.index(tuple(column))


def _is_counted(gradient: Tensor) -> bool:
    """Return whether this rank's rows of a gradient count, and no other rank's.

    If a tensor's mesh has only some of the ranks, the others hold the same rows on meshes of their own: the main rank's
    mesh counts.
    """
    holders, rank = find_holders(gradient), distributed.get_rank()
    return 0 in holders.regions and rank in list_alike(holders, rank)[:1]


@functools.lru_cache(maxsize=4096)
def _list_columns(holders: TensorHolders) -> list[tuple[int, ...]]:
    """Return the offsets of the parts of a tensor's rows, sorted."""
    return sorted({each.offset[1:] for each in holders.regions.values() if each.size})


def _to_rows(gradient: Tensor) -> Tensor:
    """Return the rows that this rank holds as a matrix of real numbers."""
    local = local_of(gradient) if is_sharded(gradient) else gradient
    local = local if local.dim() else local[None]
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.reshape(len(local), math.prod(local.shape[1:]))


def _cut(rows: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of a matrix in pieces, each after the index of its first row.

    A piece has at most ``most`` numbers, or a single row.
    """
    count = max(1, most // max(1, rows.shape[1]))
    for start in range(0, len(rows), count):
        yield start, rows[start : start + count]


def _describe_kind(piece: tuple[slice, Tensor]) -> tuple[int, torch.dtype, torch.device]:
    """Return the width, dtype and device of a piece: pieces that are equal in all three can be joined."""
    return piece[1].shape[1], piece[1].dtype, piece[1].device
