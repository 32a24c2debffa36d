"""The state of an object without a ``state_dict``: its plain attributes that have changed since it was created."""

import copy
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from holdfast.state.generators import is_generator
from holdfast.state.originals import Originals
from holdfast.state.reading import ContainerReader
from holdfast.state.ties import Ties
from holdfast.state.writing import ContainerWriter, has_same_bits

SCALARS = (bool, int, float, str, bytes, type(None))
KEYS = (str, int, float, bool)
# A placeholder for generators in the copy with which attributes are compared at a save. No generator equals the
# placeholder, so every generator counts as changed and is saved.
UNKNOWN = object()


class Attributes:
    """The plain attributes of an object that have changed since it was built, as the object's state.

    Plain values are numbers, strings, tensors, arrays, generators of random numbers, and lists, deques, tuples and
    dicts of plain values. Other attributes (files, progress bars, models) aren't saved. Settings don't change, so they
    aren't saved either, and a run that resumes with new settings uses the new settings. An attribute that still refers
    to the same tensor, array, container or generator as when the object was built is restored in place.

    Args:
        find: a function that returns the object, because a new object may replace it.
        is_measured: returns whether the name of an attribute or of a dict's item belongs to a measured value, such as a
            time. Measured values aren't saved.
        is_duration: returns whether an item of a dict is a duration, from the dict and the item's key. Durations aren't
            saved either.
    """

    def __init__(
        self,
        find: Callable[[], Any],
        is_measured: Callable[[str], bool],
        is_duration: Callable[[Any, Any], bool] = lambda container, key: False,
    ) -> None:
        self._find, self._is_measured, self._is_duration = find, is_measured, is_duration
        plain = self._list_plain()
        self._built = {name: self._copy(value) for name, value in plain.items()}
        self._ties, self._originals = Ties({}), Originals(plain, "attributes", self._is_left_out)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that are new or have changed, and those that an optimizer may step, by name."""
        state = self._read(self._list_changed(), self._originals)
        self._originals.drop()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved attributes. Give a changed attribute that wasn't saved the value that it was built with."""
        own = self._find()
        unchanged = {name: self._built[name] for name in self._list_changed() if name in self._built.keys() - state}
        built = {name: self._copy(value) for name, value in unchanged.items()}
        restored: dict[str, Any] = {}
        state = state | self._read(built, Originals({}, "attributes"))
        ContainerWriter("attributes", self._originals, self._ties).write_all(restored, {"value": state})
        for name, value in restored.items():
            setattr(own, name, value)

    def _read(self, attributes: dict[str, Any], originals: Originals) -> dict[str, Any]:
        reader = ContainerReader("attributes", originals, self._ties, self._is_left_out, is_strict=False)
        return reader.read_all(attributes)["value"]  # type: ignore[no-any-return]

    def _is_left_out(self, container: Any, key: Any) -> bool:
        return isinstance(key, str) and (self._is_measured(key) or self._is_duration(container, key))

    def _list_plain(self) -> dict[str, Any]:
        found = vars(self._find()).items()
        return {name: value for name, value in found if is_plain(value) and not self._is_measured(name)}

    def _list_changed(self) -> dict[str, Any]:
        return {name: value for name, value in self._list_plain().items() if self._is_changed(name, value)}

    def _is_changed(self, name: str, value: Any) -> bool:
        """Return whether an attribute has another value, or another object of equal value, than when it was built.

        A step may replace an attribute by an equal one, as a metric's ``reset`` does. A resumed process replaces it,
        too, so that later checkpoints are equal.
        """
        if name not in self._built or _learns(value) or not _is_same(self._strip(value), self._built[name]):
            return True
        return self._originals.has_replaced((name,), value)

    def _strip(self, value: Any) -> Any:
        """Return a value whose dicts lack measured items, such as times. Tensors and generators aren't copied."""
        if isinstance(value, dict):
            kept = (key for key in value if not self._is_left_out(value, key))
            return {key: self._strip(value[key]) for key in kept}
        if isinstance(value, list):
            return [self._strip(each) for each in value]
        if isinstance(value, deque):
            return deque(map(self._strip, value), value.maxlen)
        return tuple(map(self._strip, value)) if isinstance(value, tuple) else value

    def _copy(self, value: Any) -> Any:
        """Return a deep copy of the result of `_strip`, with `UNKNOWN` in place of each generator."""
        return _copy_leaves(self._strip(value))


def is_plain(value: Any, within: Collection[int] = ()) -> bool:
    """Return whether a value is plain, so that it can be saved and restored without code of its class.

    Args:
        within: the ids of the containers that contain the value. A value that contains itself is not plain.
    """
    if type(value) in SCALARS or isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return not isinstance(value, np.ndarray) or value.dtype != object
    if id(value) in within:
        return False
    inside = {*within, id(value)}
    if isinstance(value, dict):
        return all(type(key) in KEYS for key in value) and all(is_plain(each, inside) for each in value.values())
    if type(value) is tuple or isinstance(value, list | deque):
        return all(is_plain(each, inside) for each in value)
    return is_generator(value)


def _learns(value: Any) -> bool:
    """Return whether a value is a parameter, such as SAC's ``log_ent_coef``, or contains one."""
    if isinstance(value, dict | list | tuple):
        return any(map(_learns, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        try:
            return one.dtype == other.dtype and torch.equal(one, other)
        except NotImplementedError:  # torch can't compare floats of 4 bits
            return has_same_bits(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(_is_same(each, other[key]) for key, each in one.items())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _copy_leaves(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_leaves(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copy_leaves(each) for each in value]
    if isinstance(value, deque):
        return deque(map(_copy_leaves, value), value.maxlen)
    if isinstance(value, tuple):
        return tuple(map(_copy_leaves, value))
    if is_generator(value):
        return UNKNOWN
    return copy.deepcopy(value.detach() if isinstance(value, torch.Tensor) else value)
