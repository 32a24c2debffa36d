"""The norm of a gradient in a fixed order: the same bits for whole tensors and for tensors that are cut by rows."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed

from holdfast.state import is_sharded
from holdfast.state.sharded import list_regions, local_of
from holdfast.training.tree import sum_columns

# The squares of about so many numbers are in memory at once.
MOST_NUMBERS = 2**22


def take_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of some gradients; scalar float32, or float64 if one of them is.

    The squares of each row (an index of the first dimension) are added first, in an order that follows from the row's
    length alone. No row is cut, so each rank adds those of its own rows. Then all ranks add the sums of all rows.
    """
    if not gradients:
        return torch.zeros(())
    dtype = torch.float64 if any(each.dtype in (torch.float64, torch.complex128) for each in gradients) else torch.float
    *firsts, total = itertools.accumulate((_count_rows(each) for each in gradients), initial=0)
    sums = torch.zeros(1, total, dtype=dtype, device=gradients[0].device)
    rows = [_to_rows(each) for each in gradients]
    for group in _group(rows):
        squares = torch.cat([rows[number].to(dtype) for number in group])
        pieces = torch.split(sum_columns(squares.mul_(squares)), [len(rows[number]) for number in group])
        for number, piece in zip(group, pieces, strict=True):
            first = firsts[number] + _find_first(gradients[number])
            sums[0, first : first + len(piece)] = piece
    if any(map(is_sharded, gradients)):
        distributed.all_reduce(sums)  # exact: of each row all ranks but one have a zero
    return sum_columns(sums)[0].sqrt()


def clip_to(gradients: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients down to a norm of at most ``limit``, as torch's ``clip_grad_norm_`` does."""
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for each in gradients:
        (local_of(each) if is_sharded(each) else each).mul_(scale.to(each.device))


def _count_rows(gradient: Tensor) -> int:
    return len(gradient) if gradient.dim() else 1


def _find_first(gradient: Tensor) -> int:
    """Return the first row that this rank holds."""
    return list_regions(gradient)[distributed.get_rank()].offset[0] if is_sharded(gradient) else 0


def _to_rows(gradient: Tensor) -> Tensor:
    """Return the rows that this rank holds as a matrix of real numbers."""
    local = local_of(gradient) if is_sharded(gradient) else gradient
    local = local if local.dim() else local[None]
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.reshape(len(local), math.prod(local.shape[1:]))


def _group(rows: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield groups of matrices that can be joined, each with the numbers of its members: of equal width and kind."""
    alike: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for number, each in enumerate(rows):
        alike.setdefault((each.shape[1], each.dtype, each.device), []).append(number)
    for members in alike.values():
        group, size = list[int](), 0
        for number in members:
            if group and size + rows[number].numel() > MOST_NUMBERS:
                yield group
                group, size = [], 0
            group.append(number)
            size += rows[number].numel()
        yield group
