"""Views among the items of a kept container: items that share memory with a value that is restored in place."""

import bisect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import StateError
from holdfast.state.encoding import DTYPE_NAMES, DTYPES, NUMPY_NAMES
from holdfast.state.layout import find_extent
from holdfast.state.originals import Originals, list_inside
from holdfast.state.tensor_forms import is_sharded
from holdfast.state.ties import Ties, has_memory

# The kinds of a view's base: a module's tensor; a tensor or array that is kept directly; an original of a container.
MODULE, KEPT, ORIGINAL = "module", "kept", "original"


class _Base(NamedTuple):
    """A tensor or an array without gaps that is restored in place. Other values may be views of its memory."""

    device: str
    start: int
    stop: int
    kind: str
    key: Any


class Views:
    """The bases of views. A save finds the base of each view; a restore creates the view again.

    Args:
        owned: the tensors of kept modules, by name.
        container: the container that is being read; its originals may be bases, too.
    """

    def __init__(self, owned: Mapping[str, Tensor], ties: Ties, originals: Originals, container: Any = None) -> None:
        self._owned, self._ties, self._originals = owned, ties, originals
        self._groups: list[list[_Base]] = []
        for each in sorted(self._list_bases(container)):
            group = self._groups[-1] if self._groups else []
            if group and group[0].device == each.device and each.start < max(other.stop for other in group):
                group.append(each)
            else:
                self._groups.append([each])
        self._starts = [(group[0].device, group[0].start) for group in self._groups]

    def _list_bases(self, container: Any) -> Iterator[_Base]:
        values: list[tuple[str, Any, Any]] = [(MODULE, name, each) for name, each in self._owned.items()]
        values += [(KEPT, name, each) for name, each in self._ties.list_kept()]
        values += [(ORIGINAL, number, each) for number, each in self._list_present(container)]
        for kind, key, value in values:
            if _is_plain(value):
                extent = find_extent(value, "", {})
                if extent.stop - extent.start == value.nbytes and extent.first == extent.start:
                    yield _Base(extent.device, extent.start, extent.stop, kind, key)

    def _list_present(self, value: Any) -> Iterator[tuple[int, Any]]:
        """Yield pairs of number and original, for each original (see `Originals`) that is still in the container."""
        if isinstance(value, Tensor | np.ndarray) and (number := self._originals.find(value)) is not None:
            yield number, value
        for _, each in list_inside(value):
            yield from self._list_present(each)

    def find(self, value: Any) -> dict[str, Any] | None:
        """Return a description of a view: its base, and its position in the base. None if the value isn't a view."""
        if not _is_plain(value) or (isinstance(value, Tensor) and value.dtype not in DTYPE_NAMES):
            return None
        extent = find_extent(value, "", {})
        place = bisect.bisect(self._starts, (extent.device, extent.start)) - 1
        for base in self._groups[place] if place >= 0 else ():
            if base.device == extent.device and base.start <= extent.start and extent.stop <= base.stop:
                is_array = isinstance(value, np.ndarray)
                found = {
                    "of": [base.kind, base.key],
                    "dtype": (NUMPY_NAMES if is_array else DTYPE_NAMES)[value.dtype],
                    "offset": extent.first - base.start,
                    "shape": [*value.shape],
                    "strides": [*extent.strides],
                }
                return found | ({"array": bool(value.flags.writeable)} if is_array else {})
        return None

    def take(self, view: dict[str, Any]) -> Any:
        """Create the view that `find` has described.

        Raises:
            StateError: the view's base doesn't exist in this process.
        """
        kind, key = view["of"]
        kept = dict(self._ties.list_kept())
        base = self._owned.get(key) if kind == MODULE else kept.get(key) if kind == KEPT else self._originals.get(key)
        if not _is_plain(base):
            raise StateError(
                f"a kept container had a view of {key}, but {key} doesn't exist when the run resumes",
                hint="make the viewed tensor or array before run.keep, or keep a copy in place of the view",
            )
        assert base is not None
        base = torch.from_numpy(base) if isinstance(base, np.ndarray) else base.detach()
        dtype, shape = DTYPES[view["dtype"]], tuple(view["shape"])
        memory = torch.empty(0, dtype=torch.uint8, device=base.device).set_(
            base.untyped_storage(), base.storage_offset() * base.itemsize, (base.nbytes,), (1,)
        )
        if "array" in view:
            numbers = np.dtype(str(dtype).removeprefix("torch."))
            array = np.ndarray(shape, numbers, memory.numpy(), view["offset"], tuple(view["strides"]))
            array.flags.writeable = view["array"]
            return array
        first = (base.storage_offset() * base.itemsize + view["offset"]) // dtype.itemsize
        strides = [each // dtype.itemsize for each in view["strides"]]
        return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), first, shape, strides)


def _is_plain(value: Any) -> bool:
    """Return whether a value may be a view or a view's base: a plain array, or a tensor that has memory."""
    if isinstance(value, np.ndarray):
        return type(value) is np.ndarray and value.size > 0 and value.dtype in NUMPY_NAMES
    return isinstance(value, Tensor) and has_memory(value) and not is_sharded(value)
