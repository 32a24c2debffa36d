"""Sharded tensors (torch's `DTensor`): their bytes, and the region that each rank holds; a form of tensors.

A payload contains a sharded tensor under its full name and with its full shape, as if a single rank held the tensor.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.state.tensor_forms import RegionBytes, TensorForm, gather_whole, is_sharded, local_of
from holdfast.state.tensors import TensorBytes

# A rank that holds only a part of each row pads its rows with zeros to full width. It pads at most this number of bytes
# at a time.
PADDED_BYTES = 2**24


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


class ShardedBytes(RegionBytes):
    """A range of the bytes of a sharded tensor; a `checkpoint.payload.Source`.

    Attributes:
        tensor: a `DTensor`, of which this rank holds a region; or an ordinary tensor of a pipeline stage. An ordinary
            tensor is on the device ``meta`` if this rank holds nothing of it; otherwise this rank holds all of it.
        start: the offset of the range's first byte in the tensor's bytes.
    """

    __slots__ = ("_size_bytes", "address", "start")

    def __init__(self, tensor: Any, start: int = 0, stop: int | None = None) -> None:
        super().__init__(tensor)
        self.start, self.address = start, 0
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


def cut_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a sharded tensor that is divided over the ranks as ``like`` is, and whose elements are stored row by row.

    Args:
        local: this rank's region of the new tensor.
    """
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    found: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )
    return found


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


class ShardForm(TensorForm):
    """The form of a `DTensor`; see `TensorForm`."""

    def check(self, tensor: Any, name: str) -> None:
        """Raise StateError if the tensor is a partial sum: each rank holds an addend, and the sum isn't computed."""
        if any(each.is_partial() for each in tensor.placements):
            raise StateError(
                f"{name} can't be saved: it is a partial sum, whose addends are still spread over the ranks",
                hint="sum it with tensor.redistribute(placements=[Replicate()]), or leave the tensor out of the state",
            )

    def bytes_of(self, tensor: Any) -> ShardedBytes:
        return ShardedBytes(tensor)

    def local(self, tensor: Any) -> torch.Tensor:
        local: torch.Tensor = tensor.detach().to_local()
        return local

    def whole(self, tensor: Any) -> Any:
        return tensor.detach().full_tensor()

    def place(self, tensor: Any) -> tuple[Any, ...]:
        local = self.local(tensor)
        # Don't use data_ptr, which is 0 in every rank that holds no row.
        first = local.untyped_storage().data_ptr() + local.storage_offset() * local.itemsize
        return first, "sharded", tensor.dtype, tensor.shape, tensor.stride(), tensor.device

    def describe(self, tensor: Any) -> tuple[Any, ...]:
        return tuple(tensor.shape), tensor.device_mesh.mesh.tolist(), tuple(tensor.placements)

    def list_rows(self, tensor: Any, *, is_by_place: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield pairs of an offset and whole rows. The offset, in bytes, is that of the first row.

        If this rank holds only a part of each row, as with tensor parallelism, the other parts are filled with zeros,
        and a few rows are yielded at a time. If a rank with a lower number holds the same region, nothing is yielded.
        """
        own, region = _own_rows(tensor, is_by_place), list_regions(tensor)[torch.distributed.get_rank()]
        if not own.numel():
            return
        row = math.prod(tensor.shape[1:])
        if region.shape[1:] == tensor.shape[1:] or not is_by_place:
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


def _own_rows(tensor: Any, is_by_place: bool) -> torch.Tensor:
    """Return this rank's region of a sharded tensor; empty if a rank with a lower number holds the same region.

    If the tensor's mesh has only some of the ranks, the other ranks hold the same regions on other meshes. Then return
    a region only on the mesh that contains rank 0, so that no region is counted twice.
    """
    regions, rank = list_regions(tensor), torch.distributed.get_rank()
    is_first = not any(other < rank and region == regions[rank] for other, region in regions.items())
    is_first = is_first and (0 in regions or not is_by_place)
    return local_of(tensor) if is_first else local_of(tensor).new_empty(0)


SHARDED = ShardForm()
