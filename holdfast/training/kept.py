"""What a loop keeps, in the form of a recipe: the state of its objects, sorted by what they are."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import RecipeError, StateError
from holdfast.recipe import Recipe, Stateful
from holdfast.state import is_generator, read_generator, write_generator
from holdfast.training.carried import Carried
from holdfast.training.optimizers import Optimizers, parts_of, read_rates

# Names of extras that `Kept` adds itself.
OWN_EXTRAS = MODES, GRADIENTS, ACCUMULATION = "modes", "gradients", "accumulation"


@dataclass(kw_only=True)
class Kept(Recipe):
    """The objects that a loop keeps, as a recipe without a loss: the loop trains the steps itself.

    Args:
        function: the user's function.
        originals: the objects as the loop passed them, which may be wrappers of the objects in the other fields.
        own: Holdfast's and accelerate's objects, which `find_unregistered` doesn't enter.
        list_variables: returns the variables of the loop's functions, after their names, for `find_unregistered`.
        carried: the variables that the loop carries from step to step and doesn't keep.
        schedulers: the schedulers, which the loop steps itself.
        modules: the modules by name: the model, or its parts.

    ``data`` is a loader or an iterable of batches, or None if the loop makes its own; with ``batch_size``, a dataset.
    """

    has_own_loop: ClassVar[bool] = True
    data: Any = None
    batch_size: int | None = None
    unit: str = "steps"
    function: Callable[..., object]
    originals: list[Any]
    own: list[Any]
    list_variables: Callable[[], list[tuple[str, Any]]]
    carried: list[Carried] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, nn.Module]:
        """Return the modules with parameters that an optimizer steps, by name."""
        groups = (group for part in parts_of(self.optimizer) for group in part.param_groups)
        stepped = {id(each) for group in groups for each in group["params"]}
        found = self.modules.items()
        return {name: each for name, each in found if not stepped.isdisjoint(map(id, each.parameters()))}


def sort_kept(objects: Mapping[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Return the fields ``model``, ``modules``, ``optimizer``, ``schedulers`` and ``extras`` of a `Kept`.

    One module is the model itself; several become a ``ModuleDict`` by name.

    Raises:
        RecipeError: an object's state can't be read and restored in place.
    """
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    schedulers: dict[str, Any] = {}
    extras: dict[str, Stateful] = {}
    for name, each in sorted(objects.items()):
        if isinstance(each, nn.Module):
            modules[name] = extract_model_from_parallel(each, keep_torch_compile=False)
        elif isinstance(each, AcceleratedOptimizer):
            optimizers[name] = each.optimizer
        elif isinstance(each, torch.optim.Optimizer):
            optimizers[name] = each
        elif isinstance(each, AcceleratedScheduler):
            schedulers[name] = each.scheduler
        elif isinstance(each, LRScheduler | ReduceLROnPlateau):
            schedulers[name] = each
        else:
            extras[name] = as_stateful(name, each)
    model = next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)
    optimizer: Any = next(iter(optimizers.values())) if len(optimizers) == 1 else Optimizers(optimizers)
    own = {
        MODES: Modes(model),
        GRADIENTS: Gradients(model, optimizer),
        ACCUMULATION: Attributes(accelerator, ["step"]),
    }
    return {
        "model": model, "modules": modules, "optimizer": optimizer, "schedulers": list(schedulers.values()),
        "extras": extras | own,
    }  # fmt: skip


# ---- the state of objects that have no state_dict


def as_stateful(name: str, value: Any) -> Stateful:
    """Return an object whose ``state_dict`` and ``load_state_dict`` read and restore a value in place.

    Raises:
        RecipeError: that can't be done with a value of this type.
    """
    if _has_methods(value):
        return cast(Stateful, value)
    if is_generator(value):
        return _Generator(value)
    for kinds, adapter in ADAPTERS:
        if isinstance(value, kinds):
            return cast(Stateful, adapter(value))
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

    def __init__(self, value: Any) -> None:
        self.value = value


class _Tensor(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.value.copy_(state["value"])


class _Array(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value[...] = state["value"]


class _Dict(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": {key: _read(each) for key, each in self.value.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = {key: _write(self.value.get(key), each) for key, each in state["value"].items()}
        self.value.clear()
        self.value.update(saved)


class _Sequence(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": [_read(each) for each in self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = [*self.value, *[None] * len(state["value"])]
        saved = [_write(mine, each) for mine, each in zip(own, state["value"], strict=False)]
        self.value.clear()
        self.value.extend(saved)


def _is_stateful(value: Any) -> bool:
    """Return whether an item of a container is restored in place, not replaced."""
    return _has_methods(value) or is_generator(value) or isinstance(value, dict | list | deque)


def _read(value: Any) -> Any:
    """Return the state of a container's item."""
    return as_stateful("item", value).state_dict() if _is_stateful(value) else value


def _write(value: Any, saved: Any) -> Any:
    """Restore a container's item from the result of `_read`, in place if it has a state. Return the item."""
    if _is_stateful(value):
        as_stateful("item", value).load_state_dict(saved)
        return value
    if isinstance(value, Tensor) and isinstance(saved, Tensor):
        return saved.to(value.device)
    if not isinstance(saved, dict):
        return saved
    inner = saved.get("value")  # a container that was not there when the run resumed
    if isinstance(inner, dict):
        return {key: _write(None, each) for key, each in inner.items()}
    if isinstance(inner, list):
        return [_write(None, each) for each in inner]
    raise StateError("an object of a kept container is not there when the run resumes, so that its state has no place")


class _Generator(_Adapter):
    def state_dict(self) -> dict[str, Any]:
        return {"value": read_generator(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        write_generator(self.value, state["value"])


ADAPTERS: tuple[tuple[type | tuple[type, ...], type[Any]], ...] = (
    (Tensor, _Tensor),
    (np.ndarray, _Array),
    (dict, _Dict),
    ((list, deque), _Sequence),
)


class Attributes(_Adapter):
    """Some attributes of an object, as its state."""

    def __init__(self, value: Any, names: list[str]) -> None:
        super().__init__(value)
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.value, name) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.names:
            setattr(self.value, name, state[name])


class Modes:
    """Which modules are in evaluation mode, as a state: a step may end in the middle of a user's evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {"eval": sorted(name for name, module in self._model.named_modules() if not module.training)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        evaluated = {*state["eval"]}
        for name, module in self._model.named_modules():
            module.training = name not in evaluated


class Gradients:
    """The gradients that a step leaves for the next one: those that no optimizer has taken yet.

    After a step in which an optimizer stepped, there are none: what is left in ``grad`` was taken.

    Attributes:
        lrs: the rates of all groups when an optimizer stepped first in this step; None if none has stepped.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._is_taken = True
        self.lrs: list[float] | None = None
        for part in parts_of(optimizer):
            part.register_step_pre_hook(self._note)

    def _note(self, *_: object) -> None:
        if self.lrs is None:
            self.lrs = read_rates(self._optimizer)

    def end_step(self) -> list[float] | None:
        """Return `lrs`, and forget them."""
        lrs, self.lrs = self.lrs, None
        self._is_taken = lrs is not None
        return lrs

    def clear(self) -> None:
        """Forget all gradients.

        Raises:
            RecipeError: no optimizer has taken them.
        """
        if self.state_dict():
            raise RecipeError(
                "step.shares() begins a new gradient, but no optimizer has taken the one of the step before",
                hint="step the optimizer in every step; run.batches(..., grad_accum=N) makes steps of N batches",
            )
        for each in self._model.parameters():
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        if self._is_taken:
            return {}
        return {name: each.grad for name, each in self._model.named_parameters() if each.grad is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_taken = not state
        for name, each in self._model.named_parameters():
            each.grad = state[name].to(each.device) if name in state else None
