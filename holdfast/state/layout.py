"""The layout of tensors and arrays in memory: their strides, and the memory that several of them share.

A payload contains the elements row by row. If a value has a different layout (a ``channels_last`` weight, for example)
or shares part of its memory with another value, the payload also contains the layout. So a restored value has the
same layout.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.errors import StateError
from holdfast.state.tensor_forms import is_sharded

# The maximum number of unused bytes that a restore allocates between a value's elements; see `check_gaps`.
LARGEST_GAPS_BYTES = 2**30


class Extent(NamedTuple):
    """The range of memory from an encoded value's first to its last byte.

    Attributes:
        device: the device that has the memory.
        first: the address of the element whose indices are all zero.
        start, stop: the address of the first byte, and the address after the last byte.
        name: the name of the value's tensor in the payload.
        mark: the value's mark in the payload's tree; see `holdfast.state.encoding`.
    """

    device: str
    first: int
    start: int
    stop: int
    strides: tuple[int, ...]
    item_bytes: int
    name: str
    mark: dict[str, Any]


def strides_of(value: Any) -> tuple[int, ...]:
    """Return the strides of a tensor or an array in bytes, in a normal form.

    The stride of a dimension of length 1 has no meaning. Here it gets a fixed value, so that equal layouts have equal
    strides.
    """
    shape = tuple(value.shape)
    strides = value.strides if isinstance(value, np.ndarray) else [each * value.itemsize for each in value.stride()]
    by_rows = strides_by_rows(shape, value.itemsize)
    if not math.prod(shape) or all(
        size == 1 or one == other for size, one, other in zip(shape, strides, by_rows, strict=True)
    ):
        return by_rows
    last = max(abs(stride) * size for size, stride in zip(shape, strides, strict=True) if size > 1)
    return tuple(stride if size > 1 else last for size, stride in zip(shape, strides, strict=True))


def strides_by_rows(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a value whose elements are stored row by row, without gaps."""
    return tuple(item_bytes * math.prod(map(int, shape[place + 1 :])) for place in range(len(shape)))


def lies_by_rows(value: Any) -> bool:
    """Return whether the elements of a tensor or an array are stored row by row, without gaps."""
    return strides_of(value) == strides_by_rows(value.shape, value.itemsize)


def _measure_span(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[int, int]:
    """Return where a value's memory starts and ends, in bytes relative to the element whose indices are all zero."""
    ends = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(min(0, end) for end in ends), sum(max(0, end) for end in ends) + item_bytes


def find_extent(value: Any, name: str, mark: dict[str, Any]) -> Extent:
    """Return the extent of a tensor or an array that isn't empty."""
    is_array = isinstance(value, np.ndarray)
    first = value.__array_interface__["data"][0] if is_array else value.data_ptr()
    strides = strides_of(value)
    start, stop = _measure_span(value.shape, strides, value.itemsize)
    device = "cpu" if is_array else str(value.device)
    return Extent(device, first, first + start, first + stop, strides, value.itemsize, name, mark)


def lay_as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of ``value`` with the strides of ``like`` if their layouts are equal; otherwise return ``value``.

    Tensors of equal layouts may have different strides in dimensions of length 1; see `strides_of`.
    """
    if value.shape == like.shape and value.itemsize == like.itemsize and strides_of(value) == strides_of(like):
        return value.as_strided(value.shape, like.stride())
    return value


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements into a tensor. Also copy into a tensor made by ``expand``, which torch's ``copy_`` refuses."""
    with torch.no_grad():
        if is_expanded(target):
            once = index_once(target.stride())
            target, source = target[once], source[once]
        target.copy_(source)  # don't use target.detach(), which is a new tensor if the target is sparse


def share_tensor(tensor: torch.Tensor, group: Any = None) -> None:
    """Copy the main rank's elements of a tensor to all ranks. The tensor may have any layout in memory.

    Args:
        group: a process group of all ranks that can send from the tensor's device; None for the default group.
    """
    dense = tensor.detach().contiguous()
    torch.distributed.broadcast(dense, 0, group=group)
    if dense.data_ptr() != tensor.data_ptr():
        copy_into(tensor, dense)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, because the tensor was made by ``expand``."""
    return (
        not is_sharded(tensor)
        and tensor.layout is torch.strided
        and any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def index_once(strides: Sequence[int]) -> tuple[slice, ...]:
    """Return slices of an expanded tensor that select each element in memory exactly once."""
    return tuple(slice(None) if stride else slice(1) for stride in strides)


def move(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor to a device, and return the moved tensor, with the same strides."""
    if value.device == device or lies_by_rows(value):
        return value.to(device)
    start, stop = _measure_span(value.shape, strides_of(value), value.itemsize)
    whole = value.as_strided(((stop - start) // value.itemsize,), (1,), value.storage_offset())
    return whole.to(device).as_strided(value.shape, value.stride(), 0)


def add_options(mark: dict[str, Any], options: dict[str, Any]) -> None:
    """Add options to a value's mark: the differences from a plain value with its elements row by row."""
    if "$as" in mark:
        mark["$as"][1] |= options
    else:
        inner = {**mark}
        mark.clear()
        mark["$as"] = [inner, options]


def share(extents: Iterable[Extent]) -> None:
    """Find values that share part of their memory. Add each value's position in the shared memory to the value's mark.

    Raises:
        StateError: the values are scattered over too much memory.
    """
    numbered = sorted(enumerate(extents), key=lambda each: (each[1].device, each[1].start))
    groups: list[list[tuple[int, Extent]]] = []
    end = ("", 0)
    for number, each in numbered:
        if (each.device, each.start) < end and groups and groups[-1][0][1].device == each.device:
            groups[-1].append((number, each))
            end = max(end, (each.device, each.stop))
        else:
            groups.append([(number, each)])
            end = each.device, each.stop
    shared = [group for group in groups if len({each.name for _, each in group}) > 1]
    # Number the pieces of shared memory in the order of the state, because addresses differ between processes.
    for memory, group in enumerate(sorted(shared, key=min)):
        _share_memory(memory, [each for _, each in sorted(group)])


def _share_memory(memory: int, group: list[Extent]) -> None:
    start, stop = min(each.start for each in group), max(each.stop for each in group)
    check_gaps(group[0].name, stop - start, sum({each.name: each.stop - each.start for each in group}.values()))
    for each in group:
        if (each.start - start) % each.item_bytes:
            raise StateError(
                f"{each.name} shares memory with {group[0].name}, at an offset that isn't a multiple of "
                f"{each.item_bytes} bytes, so it can't be saved",
                hint="keep a copy of one of them: .clone() of a tensor, .copy() of an array",
            )
        place = {"strides": [*each.strides], "memory": memory, "size": stop - start, "offset": each.first - start}
        add_options(each.mark, place)


def check_gaps(name: str, size_bytes: int, used_bytes: int) -> None:
    """Raise StateError if a value has larger gaps between its elements than a restore may allocate."""
    if size_bytes - used_bytes > LARGEST_GAPS_BYTES:
        raise StateError(
            f"{name} is a view whose elements are scattered over {size_bytes} bytes of memory, so it can't be saved",
            hint="keep a copy: .clone() of a tensor, .copy() of an array",
        )


class Memories:
    """Memory for restored values, with the layouts in the values' marks. Values that shared memory share it again."""

    def __init__(self) -> None:
        self._shared: dict[int, torch.Tensor] = {}
        self._made: dict[tuple[str, str], Any] = {}
        self._filling: list[tuple[torch.Tensor, np.ndarray[Any, Any]]] = []

    def make(self, kind: str, name: str, rows: torch.Tensor, options: dict[str, Any]) -> Any:
        """Return a tensor or an array with the layout in ``options``. `fill` later copies the elements of ``rows``."""
        if "strides" not in options:
            return rows if kind == "$tensor" else rows.numpy()
        other = {"$tensor": "$array", "$array": "$tensor"}[kind]
        if (other, name) in self._made:  # the value is an array that shares a tensor's memory
            found = self._made[other, name]
            return found.numpy() if kind == "$array" else torch.from_numpy(found)
        if (kind, name) not in self._made:
            strides, shape = options["strides"], tuple(rows.shape)
            start, stop = _measure_span(shape, strides, rows.itemsize)
            memory = self._take(options, stop - start)
            offset = options.get("offset", -start)
            numbers = np.ndarray(shape, _NUMBERS[rows.itemsize], memory.numpy(), offset, tuple(strides))
            self._filling.append((rows, numbers))
            self._made[kind, name] = _see(kind, memory, rows, offset, strides)
        return self._made[kind, name]

    def _take(self, options: dict[str, Any], size_bytes: int) -> torch.Tensor:
        if "memory" not in options:
            return torch.zeros(size_bytes, dtype=torch.uint8)
        number = options["memory"]
        if number not in self._shared:
            self._shared[number] = torch.zeros(options["size"], dtype=torch.uint8)
        return self._shared[number]

    def fill(self) -> None:
        """Copy the elements into all values that `make` returned."""
        for rows, numbers in self._filling:
            numbers[...] = rows.view(_INTEGERS[rows.itemsize]).numpy()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def _see(kind: str, memory: torch.Tensor, rows: torch.Tensor, offset: int, strides: Sequence[int]) -> Any:
    """Return a view of a piece of memory, with the dtype and the shape of ``rows``."""
    if kind == "$array":
        return np.ndarray(tuple(rows.shape), rows.numpy().dtype, memory.numpy(), offset, tuple(strides))
    whole = memory[: len(memory) - len(memory) % rows.itemsize].view(rows.dtype)
    return whole.as_strided(rows.shape, [each // rows.itemsize for each in strides], offset // rows.itemsize)


def has_layouts(tree: Any) -> bool:
    """Return whether a state's tree has any layouts. Versions before 0.2 wrote none."""
    if isinstance(tree, dict):
        return [*tree] == ["$as"] or any(map(has_layouts, tree.values()))
    return isinstance(tree, list) and any(map(has_layouts, tree))


def leave_out_layouts(tree: Any) -> Any:
    """Return a state's tree in the form of versions before 0.2, without layouts."""
    if isinstance(tree, dict):
        return (
            leave_out_layouts(tree["$as"][0])
            if [*tree] == ["$as"]
            else {key: leave_out_layouts(each) for key, each in tree.items()}
        )
    return [*map(leave_out_layouts, tree)] if isinstance(tree, list) else tree
