"""What a loop keeps, in the form of a recipe: the state of its objects, sorted by what they are."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.weak import TensorWeakRef

from holdfast.errors import RecipeError, StateError
from holdfast.hyperparameters import is_hyperparameter
from holdfast.recipe import Recipe, Stateful
from holdfast.state import Ties, as_stateful, is_sharded, local_of
from holdfast.training.carried import Carried
from holdfast.training.optimizers import Optimizers, parts_of, read_rates

# Names of extras that `Kept` adds itself.
OWN_EXTRAS = MODES, GRADIENTS, ACCUMULATION = "modes", "gradients", "accumulation"

# What a loop does with the gradients that an optimizer has taken: the optimizer has not stepped yet; it has stepped
# once, so that the loop has not shown it; the loop sets them to None; it leaves them, or sets them to zero in place.
NEW, ONCE, SET_TO_NONE, LEFT = "new", "once", "set to none", "left"


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
    ties = Ties(modules)
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
            extras[name] = as_stateful(name, each, ties)
    model = next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)
    optimizer: Any = next(iter(optimizers.values())) if len(optimizers) == 1 else Optimizers(optimizers)
    own = {
        MODES: Modes(model, optimizer),
        GRADIENTS: Gradients(model, optimizer),
        ACCUMULATION: Count(accelerator),
    }
    return {
        "model": model, "modules": modules, "optimizer": optimizer, "schedulers": list(schedulers.values()),
        "extras": extras | own,
    }  # fmt: skip


class Count:
    """accelerate's count of accumulated steps, as a state."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


class Modes:
    """How the modules and optimizers differ from those that the function built, beside their tensors.

    That is, which modules are in evaluation mode, as a step may end in the middle of a user's evaluation; which
    parameters have been frozen or unfrozen; and which public attributes with a plain value have another one.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._frozen = self._list_frozen()
        self._values = self._list_values()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "eval": sorted(name for name, module in self._model.named_modules() if not module.training)
        }
        if (frozen := self._list_frozen()) != self._frozen:
            state["frozen"] = frozen
        if values := self._list_changed():
            state["values"] = values
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        evaluated, frozen = {*state["eval"]}, {*state.get("frozen", self._frozen)}
        objects = self._list_objects()
        for name, module in self._model.named_modules():
            if module.training == (name in evaluated):  # torch.compile compiles again if a module's dict is written to
                module.training = name not in evaluated
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)
        values = state.get("values", {})
        for name, changed in self._list_changed().items():
            for key in changed.keys() - values.get(name, {}).keys():
                if key in self._values[name]:
                    setattr(objects[name], key, self._values[name][key])
                else:
                    delattr(objects[name], key)
        for name, changed in values.items():
            if name not in objects:
                raise StateError(
                    f"{name}, which has another {', '.join(changed)} than it was built with, is not there now"
                )
            for key, value in changed.items():
                setattr(objects[name], key, value)

    def _list_frozen(self) -> list[str]:
        return sorted(name for name, each in self._model.named_parameters() if not each.requires_grad)

    def _list_values(self) -> dict[str, dict[str, Any]]:
        return {
            name: {key: value for key, value in vars(each).items() if is_hyperparameter(key, value)}
            for name, each in self._list_objects().items()
        }

    def _list_objects(self) -> dict[str, Any]:
        optimizers = {f"optimizer {number}": part for number, part in enumerate(parts_of(self._optimizer))}
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


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


class Gradients:
    """The gradients that a step leaves for the next one.

    An optimizer takes a gradient when it steps the parameter. What becomes of it then is the loop's choice. Most loops
    set it to None before the next backward pass: it is no state, and no checkpoint has it. Others set it to zero in
    place, or never: their next step depends on it. An optimizer's second step shows which kind of loop it is. Until
    then, and for such a loop, checkpoints have all gradients of the optimizer's parameters.

    Attributes:
        lrs: the rates of all groups when an optimizer stepped first in this step; None if none has stepped.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self.lrs: list[float] | None = None
        self._parts = parts_of(optimizer)
        self._ways = [NEW] * len(self._parts)
        # By parameter: the gradient that its optimizer has taken last, and its version then.
        self._taken: dict[int, tuple[TensorWeakRef, int]] = {}
        for number, part in enumerate(self._parts):
            part.register_step_pre_hook(functools.partial(self._note, number))
            part.register_step_post_hook(functools.partial(self._take, number))

    def _note(self, number: int, *_: object) -> None:
        """Note how an optimizer's gradients have become what they are, before it steps."""
        if self.lrs is None:
            self.lrs = read_rates(self._optimizer)
        if self._ways[number] != NEW and any(self._is_left(each) for each in _list_stepped(self._parts[number])):
            self._ways[number] = LEFT
        elif self._ways[number] == ONCE:
            self._ways[number] = SET_TO_NONE

    def _take(self, number: int, *_: object) -> None:
        for each in _list_stepped(self._parts[number]):
            self._note_taken(each)
        if self._ways[number] == NEW:
            self._ways[number] = ONCE

    def _note_taken(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            self._taken.pop(id(parameter), None)
        else:
            self._taken[id(parameter)] = TensorWeakRef(gradient), _version_of(gradient)

    def _is_left(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is still the one that its optimizer took, perhaps changed in place."""
        taken = self._taken.get(id(parameter))
        return taken is not None and parameter.grad is not None and taken[0]() is parameter.grad

    def _is_taken(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is unchanged since its optimizer took it."""
        return self._is_left(parameter) and self._taken[id(parameter)][1] == _version_of(parameter.grad)

    def end_step(self) -> list[float] | None:
        """Note what the loop has left in this step. Return `lrs`, and forget them."""
        for number, part in enumerate(self._parts):
            if self._ways[number] not in (NEW, LEFT):
                stepped = _list_stepped(part)
                if any(self._is_left(each) and not self._is_taken(each) for each in stepped):
                    self._ways[number] = LEFT
        lrs, self.lrs = self.lrs, None
        return lrs

    def clear(self) -> None:
        """Forget all gradients.

        Raises:
            RecipeError: no optimizer has taken them.
        """
        if any(each.grad is not None and not self._is_taken(each) for _, each in self._list_parameters()):
            raise RecipeError(
                "step.shares() begins a new gradient, but no optimizer has taken the one of the step before",
                hint="step the optimizer in every step; run.batches(..., grad_accum=N) makes steps of N batches",
            )
        for _, each in self._list_parameters():
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients by parameter, and under "" what is known of the loop, unless it sets all to None."""
        found: dict[str, Any] = {}
        taken: list[str] = []
        settled = {
            id(each)
            for way, part in zip(self._ways, self._parts, strict=True)
            if way == SET_TO_NONE
            for each in _list_stepped(part)
        }
        for name, each in self._list_parameters():
            if each.grad is None or (self._is_taken(each) and id(each) in settled):
                continue
            found[name] = each.grad
            if self._is_left(each):
                taken.append(name)
        if set(self._ways) != {SET_TO_NONE}:
            found[""] = {"taken": sorted(taken), "ways": self._ways[:]}
        return dict(sorted(found.items()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = state.get("", {"taken": [], "ways": [SET_TO_NONE] * len(self._parts)})
        self._ways, self._taken = list(known["ways"]), {}
        for name, each in self._list_parameters():
            each.grad = state[name].to(each.device) if name in state else None
            if name in known["taken"]:
                self._note_taken(each)

    def _list_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the parameters of the model, and those that the optimizers step beside them, by name."""
        found: list[tuple[str, Tensor]] = [*self._model.named_parameters()]
        known = {id(each) for _, each in found}
        for number, group in enumerate(self._optimizer.param_groups):
            for place, each in enumerate(group["params"]):
                if id(each) not in known:
                    found.append((f"{number}.{place}", each))
        return found


def _list_stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _version_of(gradient: Any) -> int:
    """Return a number that grows with each change of a gradient in place."""
    version: int = (local_of(gradient) if is_sharded(gradient) else gradient)._version
    return version
