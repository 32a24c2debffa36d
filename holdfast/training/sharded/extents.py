"""The plan of an exchange: which bytes of a checkpoint's part are sent between its owner and other ranks."""

import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from holdfast.checkpoint import Piece
from holdfast.state.shards import Region, TensorHolders, cut_boxes, see_bytewise
from holdfast.state.tensor_forms import local_of
from holdfast.state.tensors import TensorBytes

# Pieces of at least this many bytes are sent one by one, without a copy. Smaller pieces of a window are sent together.
DIRECT_BYTES = 2**16


class Placed(NamedTuple):
    """A piece of a checkpoint's part, and the position of the piece's first byte in the part."""

    position: int
    piece: Piece


@dataclass(frozen=True)
class PieceExtent:
    """The bytes of a piece of a checkpoint's part: their position in the part, and the bytes that each rank holds.

    Attributes:
        position: the position of the piece's first byte in the part.
        start: the position of the piece's first byte in its tensor, counted row by row.
        shape: the shape of the piece's tensor, with a last dimension for the bytes of an element.
        held: by rank, the region of the piece's tensor that the rank exchanges.
        memory: the bytes of this rank's region, in the region's shape; None if this rank exchanges no bytes.
    """

    position: int
    size_bytes: int
    start: int
    shape: tuple[int, ...]
    held: Mapping[int, Region]
    memory: Tensor | None = None


@dataclass(frozen=True)
class ExchangePlan:
    """The plan to exchange one part of a checkpoint between its owner and the ranks that hold its bytes.

    Attributes:
        extents: the pieces of the part, in the order of their positions.
    """

    owner: int
    size_bytes: int
    extents: Sequence[PieceExtent]

    def list_between(self, start: int, stop: int) -> Sequence[PieceExtent]:
        """Return the pieces that have bytes between two positions in the part."""
        first = bisect.bisect_right(self.extents, start, key=lambda each: each.position + each.size_bytes)
        return self.extents[first : bisect.bisect_left(self.extents, stop, key=lambda each: each.position)]


@dataclass(frozen=True)
class Move:
    """Bytes to copy from one rank to another.

    Attributes:
        read: the bytes to send; None in all ranks but the source.
        write: the memory to which to copy the bytes; None in all ranks but the target.
    """

    source: int
    target: int
    size_bytes: int
    read: Tensor | None
    write: Tensor | None

    @property
    def is_direct(self) -> bool:
        """Return whether these bytes are sent as a separate message."""
        return self.size_bytes >= DIRECT_BYTES


def place_pieces(pieces: Iterable[Piece]) -> list[Placed]:
    """Return the non-empty pieces of a part, each with its position in the part."""
    pieces = list(pieces)
    ends = itertools.accumulate(map(len, pieces), initial=0)
    return [Placed(position, piece) for position, piece in zip(ends, pieces, strict=False) if len(piece)]


def make_extent(
    position: int, piece: Any, holders: TensorHolders | None, everywhere: Sequence[int], owner: int | None = None
) -> PieceExtent:
    """Return the `PieceExtent` of a piece.

    Args:
        holders: all ranks that hold the tensor of a sharded piece; None if the piece isn't sharded.
        everywhere: the ranks that exchange the piece's bytes if the piece isn't sharded.
        owner: for a save, the owner of the part: each byte is collected from only one rank. For a restore, None: each
            rank that holds a byte receives it.
    """
    size_bytes = len(piece)
    if holders is None:
        whole = Region((0,), (size_bytes,))
        return PieceExtent(position, size_bytes, 0, whole.shape, dict.fromkeys(everywhere, whole))
    tensor = piece.tensor
    shape, held = _describe_cut(tensor.dtype.itemsize, tuple(tensor.shape), holders, piece.start, size_bytes, owner)
    return PieceExtent(position, size_bytes, piece.start, shape, held)


# cached, because a run has the same tensors at every save, and training waits for this call
@functools.lru_cache(maxsize=2**14)
def _describe_cut(
    item_bytes: int, whole: tuple[int, ...], holders: TensorHolders, start: int, size_bytes: int, owner: int | None
) -> tuple[tuple[int, ...], Mapping[int, Region]]:
    shape, regions = see_bytewise(item_bytes, whole, holders)
    (rows,) = cut_boxes(shape, start, start + size_bytes)
    chosen = regions if owner is None else _once(regions, owner)
    common = {rank: rows.intersect(region) for rank, region in chosen.items()}
    return shape, {rank: region for rank, region in common.items() if region.size}


def _once(regions: Mapping[int, Region], owner: int) -> dict[int, Region]:
    """Return one rank for each region: the owner if it holds the region, otherwise the first rank that holds it."""
    holders = {region: rank for rank, region in reversed(list(regions.items()))}
    if owner in regions:
        holders[regions[owner]] = owner
    return {rank: region for region, rank in holders.items()}


def take_held(piece: Any, holders: TensorHolders | None, region: Region) -> Piece:
    """Return a piece reduced to the bytes that this rank holds. A piece that isn't sharded stays whole."""
    return piece if holders is None else TensorBytes(view_held(piece, holders, region))


def view_held(piece: Any, holders: TensorHolders | None, region: Region) -> Tensor:
    """Return the region of a piece that this rank holds, as uint8: a view if the memory is contiguous; else a copy."""
    if holders is None:
        return _to_bytes(piece.tensor)
    tensor = piece.tensor
    _, regions = see_bytewise(tensor.dtype.itemsize, tuple(tensor.shape), holders)
    local = regions[distributed.get_rank()]
    return _to_bytes(local_of(piece.tensor)).view(local.shape)[region.within(local)]


def _to_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def list_moves(
    plan: ExchangePlan, start: int, stop: int, window: memoryview | None, rank: int, *, is_saved: bool
) -> Iterator[Move]:
    """Yield the moves in which this rank takes part, for a byte range of a checkpoint's part.

    Args:
        start, stop: the byte range in the part.
        window: the owner's memory for the byte range; None in all other ranks.
        rank: this rank's number.
        is_saved: True for a save, in which the owner receives the bytes; False for a restore, in which the owner sends
            them.
    """
    image = None if window is None else torch.frombuffer(window, dtype=torch.uint8)
    for extent in plan.list_between(start, stop):
        first, last = max(start, extent.position), min(stop, extent.position + extent.size_bytes)
        place = first - start
        offset = extent.start - extent.position
        for box in cut_boxes(extent.shape, offset + first, offset + last):
            placed = None if image is None else image[place : place + box.size].view(box.shape)
            place += box.size
            for holder, region in extent.held.items():
                if rank in (holder, plan.owner) and (common := box.intersect(region)).size:
                    mine = its = None
                    if holder == rank:
                        assert extent.memory is not None
                        mine = extent.memory[common.within(region)]
                    if placed is not None:
                        its = placed[common.within(box)]
                    ends = (holder, plan.owner) if is_saved else (plan.owner, holder)
                    memory = (mine, its) if is_saved else (its, mine)
                    yield Move(*ends, common.size, *memory)
