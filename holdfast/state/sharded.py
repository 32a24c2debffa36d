"""Sharded tensors (torch's `DTensor`): their bytes, and the region that each rank holds.

A payload contains a sharded tensor under its full name and with its full shape, as if a single rank held the tensor.
"""

import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from holdfast.checkpoint import Payload, Tensor
from holdfast.errors import StateError
from holdfast.state.tensors import TensorBytes

T = TypeVar("T")


@dataclass(frozen=True)
class Region:
    """A box of a tensor: its first index and its length in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def intersect(self, other: "Region") -> "Region":
        """Return the intersection of two regions. If they don't overlap, it has length 0 in some dimension."""
        first = tuple(map(max, self.offset, other.offset))
        ends = ([start + size for start, size in zip(each.offset, each.shape, strict=True)] for each in (self, other))
        last = map(min, *ends)
        return Region(first, tuple(max(0, end - start) for start, end in zip(first, last, strict=True)))

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Return the slices that select this region from a tensor with the elements of the larger region ``outer``."""
        starts = [mine - its for mine, its in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class ShardedBytes:
    """A range of the bytes of a sharded tensor; a `checkpoint.payload.Source`.

    Attributes:
        tensor: a `DTensor`, of which this rank holds a region; or an ordinary tensor of a pipeline stage. An ordinary
            tensor is on the device ``meta`` if this rank holds nothing of it; otherwise this rank holds all of it.
        start: the offset of the range's first byte in the tensor's bytes.
    """

    __slots__ = ("_size_bytes", "address", "start", "tensor")

    def __init__(self, tensor: Any, start: int = 0, stop: int | None = None) -> None:
        self.tensor, self.start, self.address = tensor, start, 0
        self._size_bytes = (tensor.nbytes if stop is None else stop) - start

    def __len__(self) -> int:
        return self._size_bytes

    @property
    def is_on_host(self) -> bool:
        return bool(local_of(self.tensor).is_cpu)

    def __getitem__(self, piece: slice) -> "ShardedBytes":
        start, stop, _ = piece.indices(len(self))
        return ShardedBytes(self.tensor, self.start + start, self.start + stop)

    def in_memory(self) -> memoryview:
        """Return the bytes, gathered from all ranks. All ranks call it together. Use it only for small tensors."""
        whole = TensorBytes(gather_whole(self.tensor)).in_memory()
        return whole[self.start : self.start + len(self)]

    def copy_to(self, target: memoryview) -> None:
        """Copy the bytes, gathered from all ranks, to the target."""
        target[:] = self.in_memory()


def is_sharded(value: Any) -> bool:
    """Return whether a value is a `DTensor`: a tensor that is sharded over the ranks or replicated in them."""
    # Don't import `DTensor` at the top of the module: a run without sharded tensors would wait 1.3 s for the import.
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(value, found.DTensor)


def shard_of(tensor: Tensor) -> Any:
    """Return the `DTensor` from which a payload's tensor was made; None if the tensor isn't sharded."""
    piece = tensor.pieces[0] if tensor.pieces else None
    return piece.tensor if isinstance(piece, ShardedBytes) else None


def has_shards(payload: Payload) -> bool:
    """Return whether some of a state's tensors are sharded."""
    return any(shard_of(tensor) is not None for tensor in payload.tensors.values())


def local_of(tensor: Any) -> torch.Tensor:
    """Return a view of the region of a sharded tensor that this rank holds."""
    local: torch.Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()
    return local


def cut_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a sharded tensor that is divided over the ranks as ``like`` is, and whose elements lie row by row.

    Args:
        local: this rank's region of the new tensor.
    """
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    found: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )
    return found


def gather_whole(value: T) -> T:
    """Return a sharded tensor as a whole tensor, and any other value as it is.

    For a sharded tensor all ranks call this together.
    """
    if not is_sharded(value):
        return value
    sharded: Any = value
    whole: T = sharded.detach().full_tensor()
    return whole


def localize(payload: Payload) -> Payload:
    """Return a state in which this rank's shard, a plain tensor, replaces each sharded tensor."""
    return Payload({name: _localize(tensor) for name, tensor in payload.tensors.items()}, payload.tree)


def list_moved(saved: Payload, now: Payload) -> list[str]:
    """Return the names of sharded tensors in ``saved`` that are sharded differently in ``now``."""
    places = {name: _describe_place(each) for name, each in saved.tensors.items()}
    common = [name for name, place in places.items() if place is not None and name in now.tensors]
    return [name for name in common if _describe_place(now.tensors[name]) != places[name]]


def _describe_place(tensor: Tensor) -> Any:
    """Return a tensor's mesh and placements; None if the tensor is not sharded."""
    shard = shard_of(tensor)
    return None if shard is None else describe_shard(shard)[1:]


def describe_shard(tensor: Any) -> tuple[Any, ...]:
    """Return a sharded tensor's shape, mesh and placements."""
    return tuple(tensor.shape), tensor.device_mesh.mesh.tolist(), tuple(tensor.placements)


def _localize(tensor: Tensor) -> Tensor:
    if (shard := shard_of(tensor)) is None:
        return tensor
    local = local_of(shard)
    return Tensor(tensor.dtype, tuple(local.shape), (TensorBytes(local) if local.numel() else b"",))


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's place in memory. Two tensors with equal places are tied."""
    if is_sharded(tensor):
        local = local_of(tensor)
        # Don't use data_ptr, which is 0 in every rank that holds no row.
        first = local.untyped_storage().data_ptr() + local.storage_offset() * local.itemsize
        return first, "sharded", tensor.dtype, tensor.shape, tensor.stride(), tensor.device
    return tensor.data_ptr(), "whole", tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def check_is_cut(tensor: Any, name: str) -> None:
    """Raise StateError if a `DTensor` is a partial sum: each rank holds one summand, and the sum isn't computed yet.

    Args:
        name: the tensor's name, for the message.
    """
    if any(each.is_partial() for each in tensor.placements):
        raise StateError(
            f"{name} is a partial sum, whose addends are still spread over the ranks, and can't be saved",
            hint="sum it with tensor.redistribute(placements=[Replicate()]), or leave the tensor out of the state",
        )


def cut_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    """Yield consecutive boxes that together contain a tensor's elements ``[start, stop)``, counted row by row."""
    row = math.prod(shape[1:])
    while start < stop:
        first, begin = divmod(start, row)
        if begin or stop - start < row:
            end = min(stop, (first + 1) * row)
            for inner in cut_boxes(shape[1:], begin, end - first * row):
                yield Region((first, *inner.offset), (1, *inner.shape))
        else:
            end = stop - stop % row
            yield Region((first, *(0 for _ in shape[1:])), ((end - start) // row, *shape[1:]))
        start = end


class Bytewise(NamedTuple):
    """A sharded tensor as a tensor of bytes: its shape, and the region that each rank holds, by rank.

    The bytes of an element form an additional dimension. If every rank holds whole rows, all dimensions are joined into
    one.
    """

    shape: tuple[int, ...]
    regions: dict[int, Region]


@dataclass(frozen=True, eq=False)
class TensorHolders:
    """The ranks that hold a sharded tensor, and the region of each rank. An object is hashed by its identity."""

    regions: Mapping[int, Region]


@functools.lru_cache(maxsize=4096)
def list_alike(holders: TensorHolders, rank: int) -> tuple[int, ...]:
    """Return, sorted, the ranks that hold the same region of a tensor as ``rank``; empty if ``rank`` holds nothing."""
    own = holders.regions.get(rank)
    if own is None or not own.size:
        return ()
    return tuple(sorted(each for each, region in holders.regions.items() if region == own))


@functools.lru_cache(maxsize=4096)  # cached, because a model has many tensors of equal shape
def see_bytewise(item_bytes: int, whole: tuple[int, ...], holders: TensorHolders) -> Bytewise:
    """Return the shape and the ranks' regions of a sharded tensor, in bytes.

    Args:
        item_bytes: the size of an element.
        whole: the tensor's shape.
    """
    shape, found = (*whole, item_bytes), holders.regions
    regions = [Region((*each.offset, 0), (*each.shape, item_bytes)) for each in found.values()]
    if all(each.shape[1:] == shape[1:] or not each.size for each in regions):
        row = math.prod(shape[1:])
        regions = [Region((each.offset[0] * row,), (each.size,)) for each in regions]
        shape = (math.prod(shape),)
    return Bytewise(shape, dict(zip(found, regions, strict=True)))


def list_regions(tensor: Any) -> Mapping[int, Region]:
    """Return the region of a sharded tensor that each rank of its mesh holds, by rank."""
    return find_holders(tensor).regions


def find_holders(tensor: Any) -> TensorHolders:
    """Return the holders of a sharded tensor among the ranks of its mesh.

    If the mesh has only some of the ranks, other ranks may hold the tensor on other meshes, and aren't returned. For an
    ordinary tensor, return this rank alone.
    """
    if not is_sharded(tensor):
        whole = Region((0,) * tensor.dim(), tuple(tensor.shape))
        return TensorHolders({} if tensor.is_meta else {torch.distributed.get_rank(): whole})
    return _find_holders(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))


@functools.lru_cache(maxsize=4096)  # cached, because a model has many tensors of equal shape
def _find_holders(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> TensorHolders:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes = tuple(mesh.shape)
    coordinates = torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist()
    found = [_compute_local_shape_and_global_offset(shape, sizes, each, placements) for each in coordinates]
    regions = [Region(tuple(offset), tuple(local)) for local, offset in found]
    return TensorHolders(dict(zip(mesh.mesh.flatten().tolist(), regions, strict=True)))
