"""The attributes and items of objects, put back by identity after code has replaced them."""

import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.state.slots import read_slots

# Objects of these types have no attributes that a restore replaces.
LEFT_ALONE = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, torch.Tensor, np.ndarray,
    torch.dtype, torch.device, str, bytes, int, float, complex, type(None),
)  # fmt: skip
CONTAINERS = (dict, list, deque, set, tuple, frozenset, types.MethodType)
OF_TORCH = (nn.Module, torch.optim.Optimizer, LRScheduler, ReduceLROnPlateau)
# Other objects of these libraries, and of Python, hold devices, groups of ranks and locks.
LIBRARIES = ("torch", "accelerate")
NAMESPACES = ("SimpleNamespace", "Namespace")
MOST_OBJECTS = 200_000


class References:
    """The attributes and items of some objects, and of the objects and containers inside them.

    Attributes:
        is_complete: whether all objects were found; False if there are more than `MOST_OBJECTS`.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}  # keeps the objects alive, because an id is unique only while its object exists
        self._items: list[tuple[Any, Any]] = []
        self._slots: list[tuple[Any, dict[str, Any]]] = []
        waiting = [*roots]
        first = {id(each) for each in waiting}
        while waiting and len(self._seen) < MOST_OBJECTS:
            value = waiting.pop()
            if id(value) not in self._seen and (id(value) in first or _is_entered(value)):
                self._seen[id(value)] = value
                waiting += self._look_into(value)
        self.is_complete = not waiting

    def _look_into(self, value: Any) -> list[Any]:
        """Note a value's items and attributes, and return them."""
        found: list[Any] = []
        if isinstance(value, dict | list | deque | set):
            self._items.append((value, _copy(value)))
            found += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple | frozenset):
            found += value
        elif isinstance(value, types.MethodType):
            found.append(value.__self__)
        attributes = getattr(value, "__dict__", None)  # read a container's attributes, too: its class may be derived
        if isinstance(attributes, dict):
            self._items.append((attributes, {**attributes}))
            found += attributes.values()
        if slots := read_slots(value):
            self._slots.append((value, slots))
            found += slots.values()
        return found

    def put_back(self) -> None:
        """Put back what was replaced. Don't write without need: torch.compile compiles again after a write."""
        for container, items in self._items:
            if not _has_items(container, items):
                container.clear()
                if isinstance(container, dict):
                    for key, value in items.items():  # `update` adds counts in a Counter
                        container[key] = value
                else:
                    (container.update if isinstance(container, set) else container.extend)(items)
        for value, slots in self._slots:
            for name, each in slots.items():
                if getattr(value, name, None) is not each:
                    setattr(value, name, each)


def _is_entered(value: Any) -> bool:
    """Return whether an object may have attributes or items that a restore replaces."""
    if isinstance(value, LEFT_ALONE):
        return False
    if isinstance(value, (*CONTAINERS, *OF_TORCH)):
        return True
    top = type(value).__module__.partition(".")[0]
    return top not in LIBRARIES and (top not in sys.stdlib_module_names or type(value).__name__ in NAMESPACES)


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return {**container}
    return set(container) if isinstance(container, set) else [*container]


def _has_items(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, set):
        return bool(container == items)
    if isinstance(container, dict):
        pairs = zip(container.items(), items.items(), strict=True)
        return all(one[0] is other[0] and one[1] is other[1] for one, other in pairs)
    return all(one is other for one, other in zip(container, items, strict=True))
