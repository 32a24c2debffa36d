"""The norm of a gradient, summed in a fixed order: the same bits for whole tensors and for tensors cut by rows."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed

from holdfast.extensions.virtual_ranks.buckets import pack_alike
from holdfast.extensions.virtual_ranks.tree import sum_columns
from holdfast.state import is_sharded
from holdfast.state.shards import TensorHolders, find_holders, list_alike
from holdfast.state.tensor_forms import local_of

# The maximum number of values that are squared at once. On a CPU they have to fit into the caches. On a GPU there are
# more, so that fewer kernels are launched.
MOST_NUMBERS = 2**20
MOST_ELSEWHERE = 2**24


def take_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of gradients as a scalar: float64 if any gradient has double precision, otherwise float32.

    First the squares in each row (an index of the first dimension) are added, in an order that follows from the row's
    length alone. Each rank sums its own rows. Then all ranks add the sums of all rows. Sharding over data ranks cuts no
    row. Tensor parallelism may cut each row into parts, which then count as rows. If several ranks hold the same rows,
    the rows of one of these ranks count.
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
        distributed.all_reduce(sums)  # this sum is exact, because for each row all ranks but one have a zero
    return sum_columns(sums)[0].sqrt()


def clip_to(gradients: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients down to a norm of at most ``limit``, with the arithmetic of torch's ``clip_grad_norm_``."""
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for each in gradients:
        (local_of(each) if is_sharded(each) else each).mul_(scale.to(each.device))


def _count_rows(gradient: Tensor) -> int:
    return len(gradient) if gradient.dim() else 1


def _count_parts(gradient: Tensor) -> int:
    """Return the number of parts into which a gradient's rows are cut."""
    return len(_list_columns(find_holders(gradient))) if is_sharded(gradient) else 1


def _find_first(gradient: Tensor) -> int:
    """Return the index of this rank's first sum among the sums of all ranks.

    Each row has one sum for each of its parts.
    """
    if not is_sharded(gradient) or not local_of(gradient).numel():
        return 0
    holders = find_holders(gradient)
    columns = _list_columns(holders)
    row, *column = holders.regions[distributed.get_rank()].offset or (0,)
    return row * len(columns) + columns.index(tuple(column))


def _is_counted(gradient: Tensor) -> bool:
    """Return whether the norm counts this rank's copy of a gradient's rows, and not another rank's copy of these rows.

    If a tensor's mesh contains only some of the ranks, the other ranks hold the same rows on other meshes. Then the
    main rank's mesh counts.
    """
    holders, rank = find_holders(gradient), distributed.get_rank()
    return 0 in holders.regions and rank in list_alike(holders, rank)[:1]


@functools.lru_cache(maxsize=4096)
def _list_columns(holders: TensorHolders) -> list[tuple[int, ...]]:
    """Return the column offsets at which the parts of a tensor's rows begin, sorted."""
    return sorted({each.offset[1:] for each in holders.regions.values() if each.size})


def _to_rows(gradient: Tensor) -> Tensor:
    """Return the rows of a gradient that this rank holds, as a matrix of real numbers."""
    local = local_of(gradient) if is_sharded(gradient) else gradient
    local = local if local.dim() else local[None]
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.reshape(len(local), math.prod(local.shape[1:]))


def _cut(rows: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield pairs: the index of a piece's first row in a matrix, and the piece, some consecutive rows of the matrix.

    A piece has at most ``most`` numbers, or a single row.
    """
    count = max(1, most // max(1, rows.shape[1]))
    for start in range(0, len(rows), count):
        yield start, rows[start : start + count]


def _describe_kind(piece: tuple[slice, Tensor]) -> tuple[int, torch.dtype, torch.device]:
    """Return the width, dtype and device of a piece. Only pieces that are equal in all three can be joined."""
    return piece[1].shape[1], piece[1].dtype, piece[1].device
