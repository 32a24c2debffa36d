"""The state of values that have no ``state_dict``: containers, tensors, arrays and generators, restored in place."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import RecipeError, StateError
from holdfast.state.generators import is_generator, read_generator, write_generator
from holdfast.state.sharded import is_sharded, place_of
from holdfast.state.ties import Ties

# The kinds of containers that are made anew if a container in which they were saved lacks them on resume.
KINDS: dict[str, Callable[[], Any]] = {"OrderedDict": OrderedDict, "Counter": Counter}
# The functions that make the missing items of a defaultdict which is made anew.
FACTORIES = {each.__name__: each for each in (int, float, bool, str, list, dict, deque)}
# A saved item with this key alone is a tensor of a kept module: the tensor itself, or one that shares its memory.
SAME, DETACHED = "same", "detached"


def as_stateful(name: str, value: Any, ties: Ties | None = None) -> Any:
    """Return an object whose ``state_dict`` and ``load_state_dict`` read and restore a value in place.

    Args:
        name: the value's name in the message of an error.
        ties: the same for all values that are saved together; by default, it is alone.

    Raises:
        RecipeError: that can't be done with a value of this type.
    """
    if _has_methods(value):
        return value
    if is_generator(value):
        return _Generator(value)
    if isinstance(value, Tensor):
        return _Tensor(value, ties)
    if isinstance(value, np.ndarray):
        return _Array(value, ties)
    if isinstance(value, dict) and name:
        from holdfast.state.objects import Objects, has_objects  # it needs this module

        if has_objects(value):
            return Objects(name, value)
    if isinstance(value, dict | list | deque):
        return _Container(name, value, ties)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple):
        raise RecipeError(
            f"run.keep({name}=...): {value!r} can't be changed in place when the run resumes",
            hint=f'put it into a dict: state = {{"{name}": {value!r}}}; run.keep(state=state)',
        )
    raise RecipeError(
        f"run.keep({name}=...): expected an object with state_dict and load_state_dict, a tensor, an array, a "
        f"container or a generator of random numbers; found a {type(value).__qualname__}",
        hint=f"give its class state_dict and load_state_dict, or keep its attributes: run.keep({name}=vars({name}))",
    )


def _has_methods(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class _Adapter:
    """The state of one value without a ``state_dict``."""

    def __init__(self, value: Any, ties: Ties | None = None) -> None:
        self.value, self.ties = value, ties or Ties({})


class _Tensor(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.value.copy_(state["value"])
        if _has_memory(state["value"]):
            self.ties.note(state["value"], self.value)


class _Array(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value[...] = state["value"]
        self.ties.note(state["value"], self.value)


class _Generator(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": read_generator(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        write_generator(self.value, state["value"])


class _Container(_Adapter):
    """The state of a dict, a list or a deque, with the order of a dict's items.

    Its items stay the same objects where they can: containers, generators, objects with a ``state_dict``, and tensors
    and arrays of the saved dtype and shape. A loop may have other names for them.
    """

    def __init__(self, name: str, value: Any, ties: Ties | None = None) -> None:
        super().__init__(value, ties)
        self._name = name
        self._built = _count_objects(value)

    def state_dict(self) -> dict[str, Any]:
        items = _Items(self.ties)
        state = items.read(self.value)
        if items.objects > self._built:
            raise RecipeError(
                f"run.keep({self._name}=...): it has {items.objects} objects with a state_dict now, and had "
                f"{self._built} when it was kept: a run that resumes has no object for the others",
                hint="put their states into it: league.append(copy.deepcopy(model.state_dict()))",
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _Items(self.ties).fill(self.value, state)


class _Items:
    """One reading or writing of a container's items."""

    def __init__(self, ties: Ties) -> None:
        self._ties = ties
        self.objects = 0  # with a state_dict, among the items that were read
        found = [
            (f"{name}.{inner}", tensor)
            for name, module in ties.modules.items()
            for inner, tensor in [*module.named_parameters(), *module.named_buffers()]
        ]
        self._owned = dict(found)
        self._names = {place_of(tensor): name for name, tensor in found if _has_memory(tensor)}

    def read(self, container: Any) -> dict[str, Any]:
        """Return the state of a container."""
        if not isinstance(container, dict):
            items = [self._read_item(each) for each in container]
            return {"value": items} | ({"maxlen": container.maxlen} if isinstance(container, deque) else {})
        state: dict[str, Any] = {"value": {key: self._read_item(each) for key, each in container.items()}}
        if isinstance(container, defaultdict):
            state["factory"] = getattr(container.default_factory, "__name__", None)
        elif type(container).__name__ in KINDS:
            state["kind"] = type(container).__name__
        return state

    def fill(self, container: Any, state: dict[str, Any]) -> None:
        """Restore a container from the result of `read`, in place."""
        saved = state["value"]
        if not isinstance(container, dict):
            own = [*container, *[None] * len(saved)]
            items = [self._write_item(mine, each) for mine, each in zip(own, saved, strict=False)]
            container.clear()
            container.extend(items)
            return
        make = getattr(container, "default_factory", None)
        found = {}
        for key, each in saved.items():
            mine = container[key] if key in container else make() if make and isinstance(each, dict) else None
            found[key] = self._write_item(mine, each)
        container.clear()
        for key, item in found.items():  # the update of a Counter would add
            container[key] = item

    def _read_item(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self._names.get(place_of(value)) if _has_memory(value) else None
            if name is None:
                return value
            return {SAME if value is self._owned[name] else DETACHED: name}
        if isinstance(value, dict | list | deque) and not _has_methods(value):
            return self.read(value)
        if _is_tuple(value):
            return _remake(value, map(self._read_item, value))
        if not _is_stateful(value):
            return value
        self.objects += 1
        return as_stateful("item", value).state_dict()

    def _write_item(self, value: Any, saved: Any) -> Any:
        """Restore an item from the result of `_read_item`, in place if it can be. Return the item."""
        if _is_stateful(value):
            if isinstance(value, dict | list | deque) and not _has_methods(value):
                self.fill(value, saved)
            else:
                as_stateful("item", value).load_state_dict(saved)
            return value
        if isinstance(saved, Tensor | np.ndarray):
            return self._write_numbers(value, saved)
        if _is_tuple(saved):
            own = value if _is_tuple(value) and len(value) == len(saved) else [None] * len(saved)
            return _remake(saved, map(self._write_item, own, saved))
        if not isinstance(saved, dict):
            return saved
        if saved.keys() in ({SAME}, {DETACHED}):
            ((key, name),) = saved.items()
            if name not in self._owned:
                raise StateError(f"a kept container has the tensor {name}, which no kept module has now")
            return self._owned[name] if key == SAME else self._owned[name].detach()
        if not isinstance(saved.get("value"), dict | list):
            raise StateError(
                "an object of a kept container is not there when the run resumes, so that its state has no place"
            )
        made = _make(saved)
        self.fill(made, saved)
        return made

    def _write_numbers(self, value: Any, saved: Any) -> Any:
        """Restore a tensor or an array: in place, unless its memory has a module's values or another saved one's."""
        device = value.device if isinstance(value, Tensor) else None
        if isinstance(saved, Tensor) and (is_sharded(saved) or not _has_memory(saved)):
            return saved.to(device) if device is not None else saved
        found = self._ties.find(saved)
        if found is not None:
            return found
        if self._fits(value, saved) and self._ties.may_write(value, saved):
            if isinstance(value, Tensor):
                with torch.no_grad():
                    value.copy_(saved)
            else:
                value[...] = saved
        else:
            value = saved.to(device) if isinstance(saved, Tensor) and device is not None else saved
        self._ties.note(saved, value)
        return value

    def _fits(self, value: Any, saved: Any) -> bool:
        """Return whether a saved tensor or array can be written into a value, which shares no memory with a module."""
        if isinstance(saved, Tensor):
            if not isinstance(value, Tensor) or is_sharded(value) or not _has_memory(value):
                return False
            is_free = place_of(value) not in self._names
        else:
            if type(value) is not np.ndarray:
                return False
            is_free = value.flags.writeable
        return is_free and (value.dtype, value.shape) == (saved.dtype, saved.shape) and not _overlaps(value)


def _is_stateful(value: Any) -> bool:
    """Return whether an item of a container has a state that is restored in place."""
    return _has_methods(value) or is_generator(value) or isinstance(value, dict | list | deque)


def _count_objects(value: Any) -> int:
    """Return the number of objects with a state of their own inside a container."""
    if isinstance(value, dict | list | deque | tuple) and not _has_methods(value):
        return sum(map(_count_objects, value.values() if isinstance(value, dict) else value))
    return int(_is_stateful(value))


def _is_tuple(value: Any) -> bool:
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _remake(value: Any, items: Iterable[Any]) -> Any:
    """Return a tuple, or a named one as ``value`` is, with other items."""
    return tuple(items) if type(value) is tuple else value._make(items)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0 and bool(place_of(tensor)[0])


def _overlaps(value: Any) -> bool:
    """Return whether elements of a tensor or an array share memory with each other, as those of ``expand`` do."""
    strides = value.stride() if isinstance(value, Tensor) else value.strides
    return any(not stride and size > 1 for stride, size in zip(strides, value.shape, strict=True))


def _make(state: dict[str, Any]) -> Any:
    """Return an empty container of the kind that was saved."""
    if "maxlen" in state:
        return deque(maxlen=state["maxlen"])
    if isinstance(state["value"], list):
        return []
    if "factory" in state:
        if state["factory"] is not None and state["factory"] not in FACTORIES:
            raise StateError(
                f"a kept container has a defaultdict that calls {state['factory']}, and it is not there when the run "
                "resumes",
                hint="make it before run.keep, or use a plain dict and setdefault",
            )
        return defaultdict(FACTORIES.get(state["factory"] or ""))
    return KINDS.get(state.get("kind", ""), dict)()
