"""The memory that restored values share with each other, as the saved ones did."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.state.sharded import is_sharded, place_of


class Ties:
    """Values that may share memory with each other, and share it again after a resume.

    Args:
        modules: modules that are restored before the values. Containers may hold their tensors.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        # All by place in memory. The saved value has to be alive: then its place is not used again.
        self._restored: dict[Any, tuple[Ref, Ref]] = {}  # of a saved value: that value, and the one that has it now
        self._written: dict[Any, Ref] = {}  # of a value: the saved one that was written there

    def find(self, saved: Any) -> Any:
        """Return the value that a saved one, or another one in its memory, was restored to; None if there is none."""
        known, now = self._restored.get(_place(saved), (_no_value, _no_value))
        found = now() if known() is not None else None
        if isinstance(found, Tensor) and isinstance(saved, np.ndarray):
            return found.detach().numpy()
        return torch.from_numpy(found) if isinstance(found, np.ndarray) and isinstance(saved, Tensor) else found

    def note(self, saved: Any, now: Any) -> None:
        """Note the value that a saved one was restored to."""
        self._restored[_place(saved)] = weakref.ref(saved), weakref.ref(now)

    def may_write(self, value: Any, saved: Any) -> bool:
        """Return whether no other saved value was written to the memory of a value, and note that this one is."""
        known = self._written.get(_place(value), _no_value)()
        self._written[_place(value)] = weakref.ref(saved)
        return known is None or _place(known) == _place(saved)


Ref = Callable[[], Any]


def _no_value() -> None:
    return None


def _place(value: Any) -> Any:
    """Return where the elements of a tensor or an array are in memory. Both have the same place if they share it."""
    if isinstance(value, Tensor) and is_sharded(value):
        return place_of(value)
    if isinstance(value, Tensor):
        return value.data_ptr(), tuple(value.shape), tuple(each * value.itemsize for each in value.stride())
    return value.__array_interface__["data"][0], value.shape, value.strides
