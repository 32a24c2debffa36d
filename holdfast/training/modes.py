"""Changes to built modules and optimizers that their own ``state_dict`` doesn't contain, as an object with a state."""

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from holdfast.errors import StateError
from holdfast.provenance.hyperparameters import is_hyperparameter
from holdfast.state import is_sharded
from holdfast.training.grouping import freeze, list_frozen


@functools.cache
def _list_of_torch() -> frozenset[str]:
    """Return the names of the attributes of every module and every optimizer, which torch uses itself."""
    return frozenset({*vars(nn.Module())} | {*vars(torch.optim.SGD([torch.zeros(1)]))})


class Modes:
    """The changes to built modules and optimizers that their own ``state_dict`` doesn't contain.

    The state lists the modules in evaluation mode, because a step may end in the middle of a user's evaluation. It
    lists the frozen parameters, and the public attributes whose plain value has changed. If an attribute of a module
    has changed, the state also has the module's changed tensors and arrays. Without these tensors a resumed step could
    find, for example, a cache's length without the cache.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any], inner: "InnerModes | None" = None) -> None:
        """
        Args:
            model: a module, or `Modules`.
            inner: the changes of the modules and optimizers in kept containers.
        """
        self._model, self._optimizers, self._inner = model, optimizers, inner
        self._frozen = list_frozen(model)
        self._values = self._list_values()
        self._tensors = {name: _list_tensors(each) for name, each in self._list_objects().items()}

    def state_dict(self) -> dict[str, Any]:
        state = {"eval": self._list_evaluated()} | self._list_changes()
        if self._inner is not None and (inner := self._inner.state_dict()):
            state["inner"] = inner
        return state

    def _list_evaluated(self) -> list[str]:
        return sorted(name for name, module in self._model.named_modules() if not module.training)

    def _list_changes(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if (frozen := list_frozen(self._model)) != self._frozen:
            state["frozen"] = frozen
        if values := self._list_changed():
            state["values"] = values
        if tensors := self.list_tensors():
            state["tensors"] = tensors
            state["on_cpu"] = self._list_on_cpu(tensors)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        evaluated, objects = {*state["eval"]}, self._list_objects()
        for name, module in self._model.named_modules():
            # don't write without need: torch.compile compiles again after a write to a module's dict
            if module.training == (name in evaluated):
                module.training = name not in evaluated
        freeze(self._model, {*state.get("frozen", self._frozen)})
        values, tensors = state.get("values", {}), self.list_tensors()
        for name, changed in self._list_changed().items():
            for key in changed.keys() - values.get(name, {}).keys():
                self._put_back(objects[name], name, key)
        for name, changed in values.items():
            if name not in objects:
                raise StateError(
                    f"the checkpoint contains values of {name} ({', '.join(changed)}), but the recipe doesn't build "
                    f"{name} any more",
                    hint="build the modules and optimizers that the run had when it saved the checkpoint",
                )
            for key, value in changed.items():
                setattr(objects[name], key, value)
        self._restore_tensors(tensors, state)
        if self._inner is not None:
            self._inner.load_state_dict(state.get("inner", {}))

    def _restore_tensors(self, changed: dict[str, dict[str, Any]], state: dict[str, Any]) -> None:
        """Set attributes to the saved tensors. Other code may use the present tensors, too, so these aren't written to.

        Args:
            changed: the tensors that have changed since the build. A tensor that the state lacks is reset to its value
                as built.
        """
        objects, saved = self._list_objects(), state.get("tensors", {})
        for name, tensors in changed.items():
            for key in tensors.keys() - saved.get(name, {}).keys():
                self._put_back(objects[name], name, key)
        on_cpu, device = state.get("on_cpu", ()), self._device
        for name, tensors in saved.items():
            for key, value in tensors.items():
                setattr(objects[name], key, send_to_device(value, "cpu" if f"{name}.{key}" in on_cpu else device))

    def _put_back(self, owner: Any, name: str, key: str) -> None:
        """Reset an attribute to its value as built; delete an attribute that was added after the build."""
        if key in self._tensors[name]:
            setattr(owner, key, self._tensors[name][key][0])
        elif key in self._values[name]:
            setattr(owner, key, self._values[name][key])
        else:
            delattr(owner, key)

    def list_tensors(self) -> dict[str, dict[str, Any]]:
        """Return, by object and attribute, the changed tensors and arrays of objects with a changed plain value."""
        objects = self._list_objects()
        found: dict[str, dict[str, Any]] = {}
        for name in self._list_changed():
            built = self._tensors.get(name, {})
            changed = {
                key: value
                for key, (value, version) in _list_tensors(objects[name]).items()
                if key not in built or value is not built[key][0] or version != built[key][1]
            }
            if changed:
                found[name] = changed
        return found

    @property
    def _device(self) -> torch.device:
        return next((each.device for each in self._model.parameters()), torch.device("cpu"))

    def _list_on_cpu(self, tensors: dict[str, dict[str, Any]]) -> list[str]:
        if self._device.type == "cpu":
            return []
        return sorted(
            f"{name}.{key}"
            for name, own in tensors.items()
            for key, value in own.items()
            if all(each.device.type == "cpu" for each in _leaves(value) if isinstance(each, Tensor))
        )

    def _list_values(self) -> dict[str, dict[str, Any]]:
        return {
            name: {key: value for key, value in vars(each).items() if is_hyperparameter(key, value)}
            for name, each in self._list_objects().items()
        }

    def _list_objects(self) -> dict[str, Any]:
        optimizers = {f"optimizer {number}": part for number, part in enumerate(self._optimizers)}
        return {**dict(self._model.named_modules()), **optimizers}

    def _list_changed(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name, values in self._list_values().items():
            built = self._values.get(name, {})
            changed = {
                key: value for key, value in values.items() if key not in built or not _is_equal(value, built[key])
            }
            if changed:
                found[name] = changed
        return found


class InnerModes(Modes):
    """The changes of modules and optimizers in kept containers. The state has only what has changed since the build."""

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> None:
        """
        Args:
            modules: the modules, by name.
        """
        super().__init__(Modules(modules), optimizers)
        self._evaluated = self._list_evaluated()

    def state_dict(self) -> dict[str, Any]:
        evaluated = self._list_evaluated()
        return ({"eval": evaluated} if evaluated != self._evaluated else {}) | self._list_changes()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"eval": self._evaluated} | state)


class Modules:
    """Several modules behind the methods by which a single module lists its parts by name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[nn.Module] = set()
        for name, module in self._modules.items():
            yield from module.named_modules(memo=seen, prefix=name)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for name, module in self._modules.items():
            for inner, parameter in module.named_parameters(prefix=name):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield inner, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _list_tensors(owner: Any) -> dict[str, tuple[Any, object]]:
    """Return, by name, the value and version of each attribute that is a tensor, an array or a container of these."""
    of_torch = _list_of_torch()
    return {
        key: (value, _version_of(value))
        for key, value in vars(owner).items()
        if key not in of_torch and not isinstance(value, nn.Parameter) and _is_of_tensors(value)
    }


def _is_of_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, an array, or a container of only these."""
    if isinstance(value, Tensor):
        return not is_sharded(value)
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return type(value) in (list, tuple, dict, deque) and bool(value) and all(map(_is_of_tensors, _items(value)))


def _items(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else [*value]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Tensor | np.ndarray):
        return [value]
    return [leaf for each in _items(value) for leaf in _leaves(each)]


def _version_of(value: Any) -> object:
    """Return a value that changes when a tensor is changed in place. An array has no version and counts as changed."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, np.ndarray):
        return object()
    return [(id(each), _version_of(each)) for each in _leaves(value)]
