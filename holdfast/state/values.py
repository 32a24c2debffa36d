"""The state of values that have no ``state_dict``: containers, tensors, arrays and generators, restored in place."""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import RecipeError
from holdfast.state.clocks import list_measured
from holdfast.state.generators import is_generator, read_generator, write_generator
from holdfast.state.items import overlaps
from holdfast.state.mapped import is_foreign
from holdfast.state.metrics import Metrics, is_metric
from holdfast.state.originals import has_methods
from holdfast.state.reading import ContainerReader
from holdfast.state.tensor_forms import is_sharded
from holdfast.state.ties import Ties, has_memory
from holdfast.state.writing import ContainerWriter, resize_like


def as_stateful(name: str, value: Any, ties: Ties | None = None, leave_out: Collection[str] = ()) -> Any:
    """Return an object whose ``state_dict`` and ``load_state_dict`` read and restore a value in place.

    Args:
        name: the value's name in the message of an error.
        ties: the common `Ties` of all values that are saved together; by default the value is saved on its own.
        leave_out: the names of attributes, or of a dict's items, that are neither saved nor restored. Names that the
            value doesn't have are ignored.

    Raises:
        RecipeError: a value of this type can't be read and restored in place.
    """
    if is_metric(value):
        return Metrics(value)
    if has_methods(value):
        return value
    if is_generator(value):
        return _Generator(value)
    if isinstance(value, Tensor | np.ndarray):
        _check_memory(name, value)
        return _Tensor(name, value, ties) if isinstance(value, Tensor) else _Array(name, value, ties)
    if isinstance(value, dict) and name:
        from holdfast.state.objects import Objects, has_objects  # imported late, because that module imports this one

        if has_objects({key: each for key, each in value.items() if key not in leave_out}):
            return Objects(name, value, leave_out)
    if isinstance(value, dict | list | deque):
        return _Container(name, value, ties, leave_out)
    if value is None:
        raise RecipeError(
            f"run.keep({name}=...): None can't be changed in place when the run resumes",
            hint="if your code creates the object later, create it before run.keep, for example torch.Generator(); "
            f'keep a value that is None at first in a dict: state = {{"{name}": None}}; run.keep(state=state)',
        )
    if isinstance(value, bool | int | float | complex | str | bytes | tuple):
        raise RecipeError(
            f"run.keep({name}=...): {value!r} can't be changed in place when the run resumes",
            hint=f'put the value into a dict: state = {{"{name}": {value!r}}}; run.keep(state=state)',
        )
    if name and isinstance(getattr(value, "__dict__", None), dict):
        from holdfast.state.objects import LEFT_ALONE, Objects  # imported late, because that module imports this one

        if not isinstance(value, LEFT_ALONE):
            return Objects(name, vars(value), leave_out)
    raise RecipeError(
        f"run.keep({name}=...): expected an object with state_dict and load_state_dict, a tensor, an array, a "
        f"container or a generator of random numbers; found a {type(value).__qualname__}",
        hint=f"give its class state_dict and load_state_dict, or keep its attributes: run.keep({name}=vars({name}))",
    )


def find_left_out(stateful: Any, leave_out: Collection[str]) -> set[str]:
    """Return the names in ``leave_out`` that are names of attributes or items of an adapter from `as_stateful`."""
    from holdfast.state.objects import Objects  # imported late, because that module imports this one

    if isinstance(stateful, Objects):
        return {name for name in leave_out if stateful.has_attribute(name)}
    has_names = isinstance(stateful, _Container) and isinstance(stateful.value, Mapping)
    return {name for name in leave_out if name in stateful.value} if has_names else set()


def is_adapter(value: Any) -> bool:
    """Return whether a value is an adapter that `as_stateful` has made, whose code writes in place."""
    from holdfast.state.objects import Objects  # imported late, because that module imports this one

    return isinstance(value, _Adapter | _Generator | Objects)


def _check_memory(name: str, value: Any) -> None:
    """Raise RecipeError if a tensor or an array can't be restored in place."""
    kind = type(value)
    if kind not in (Tensor, torch.nn.Parameter, np.ndarray) and not is_sharded(value):
        raise RecipeError(
            f"run.keep({name}=...): a {kind.__module__}.{kind.__qualname__} would be restored as a plain "
            f"{'tensor' if isinstance(value, Tensor) else 'array'}, and lose what its class adds",
            hint="keep plain tensors and arrays; for a masked array, keep its data and its mask",
        )
    if is_foreign(value):
        raise RecipeError(
            f"run.keep({name}=...): a resume can't write into its memory, which is read-only or mapped from a file",
            hint=f"keep a copy: {name} = {name}.{'clone' if isinstance(value, Tensor) else 'copy'}()",
        )
    if overlaps(value):
        raise RecipeError(
            f"run.keep({name}=...): several elements of the value share one place in memory, as after expand()",
            hint=f"keep a copy: {name} = {name}.{'clone' if isinstance(value, Tensor) else 'copy'}()",
        )


class _Adapter:
    """An adapter that gives a value without a ``state_dict`` the methods to read and restore its state."""

    def __init__(self, name: str, value: Any, ties: Ties | None = None) -> None:
        self.value, self.ties = value, ties or Ties({})
        self.originals = self.ties.register(name, value)


class _Tensor(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["value"]
        if not is_sharded(saved) and (saved.shape, saved.dtype) != (self.value.shape, self.value.dtype):
            resize_like(self.value, saved)
        with torch.no_grad():
            self.value.copy_(saved)
        if has_memory(state["value"]):
            self.ties.note(state["value"], self.value)


class _Array(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value[...] = state["value"]
        self.ties.note(state["value"], self.value)


class _Generator:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": read_generator(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        write_generator(self.value, state["value"])


class _Container(_Adapter):
    """The state of a dict, a list or a deque, with the order of a dict's items.

    Readings of clocks in a dict aren't saved (see `list_measured`), and neither are the items to leave out.

    An item that the container already had when the loop began is restored in place, because other variables of the
    loop may refer to the item. A restore makes a new object for any other item.
    """

    def __init__(self, name: str, value: Any, ties: Ties | None = None, leave_out: Collection[str] = ()) -> None:
        super().__init__(name, value, ties)
        self._name = name
        self._measured = list_measured(value) | {*leave_out} if type(value) is dict else set()

    def state_dict(self) -> dict[str, Any]:
        items = ContainerReader(self._name, self.originals, self.ties)
        left_out = self._measured
        state = items.read_all(
            {key: self.value[key] for key in self.value if key not in left_out} if left_out else self.value
        )
        if items.objects > self.originals.objects:
            raise RecipeError(
                f"run.keep({self._name}=...): the container has {items.objects} objects with a state_dict now, and had "
                f"{self.originals.objects} when it was kept: a run that resumes can't make the other objects",
                hint="put the objects' states into the container: league.append(copy.deepcopy(model.state_dict()))",
            )
        self.originals.drop()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.originals.hold()
        measured = {key: self.value[key] for key in self._measured if key in self.value}
        ContainerWriter(self._name, self.originals, self.ties).write_all(self.value, state)
        if measured:
            self.value |= measured
