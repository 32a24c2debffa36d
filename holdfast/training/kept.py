"""The objects that a loop passes to `Run.keep`, sorted as in a recipe: modules, optimizers, schedulers, extras."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.data import refuse_inexact
from holdfast.memory.late_compiler import COMPILER
from holdfast.provenance.ownership import is_own
from holdfast.recipe import Recipe, Stateful
from holdfast.state import Objects, Ties, as_stateful, is_metric
from holdfast.state.optimizers import loading_exactly
from holdfast.state.originals import Originals
from holdfast.state.slots import read_attributes
from holdfast.training.adalora import ALLOCATORS, find_rank_allocators
from holdfast.training.left_gradients import Gradients
from holdfast.training.modes import InnerModes, Modes
from holdfast.training.optimizers import Optimizers, lay_out_state, list_stepped, parts_of
from holdfast.training.pruned import find_pruned

# Names of extras that `Kept` adds itself.
OWN_EXTRAS = MODES, GRADIENTS, ACCUMULATION, INNER, PRUNED, _ = (
    "modes", "gradients", "accumulation", "inner_optimizers", "pruned", ALLOCATORS
)  # fmt: skip

# The packages with wrappers of modules that few programs load.
WITH_WRAPPERS = {COMPILER, "torch.distributed.fsdp", "deepspeed"}

# Where a variable was found: in a user's own loop, or among the framework's objects that an adapter lists.
LOOP, FRAMEWORK = "loop", "framework"


class Variable(NamedTuple):
    """A variable of a loop, with the place of the variable's first use; see `holdfast.checkpoint.found.Found`."""

    name: str
    value: Any
    place: str = ""
    root: str = LOOP


@dataclass(kw_only=True)
class Kept(Recipe):
    """The objects that a loop keeps, as a recipe without a loss, because the loop trains the steps itself.

    Args:
        function: the user's function.
        originals: the objects as the loop passed them to `Run.keep`: they may be wrappers of the objects in the fields
            below.
        own: Holdfast's and accelerate's objects, which `find_forgotten` leaves out.
        list_variables: returns the variables that the loop's functions carry from step to step, for `find_forgotten`.
        constants: the plain values that the loop reads and never assigns, by name.
        schedulers: the schedulers, in the order of their names; the loop steps them itself.
        scheduler_names: the names of `schedulers`.
        modules: the modules by name: the model, or its parts.
        contained: the modules and optimizers in kept containers, by name.
        names: the names that `Run.keep` got.

    ``data`` is a dataset if ``batch_size`` is given. Without ``batch_size`` it is a loader or an iterable of batches,
    or None if the loop makes its own batches.
    """

    has_own_loop: ClassVar[bool] = True
    data: Any = None
    batch_size: int | None = None
    unit: str = "steps"
    function: Callable[..., object]
    originals: list[Any]
    own: list[Any]
    list_variables: Callable[[], list[Variable]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    schedulers: list[Any] = field(default_factory=list)
    scheduler_names: list[str] = field(default_factory=list)
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    contained: Mapping[str, Any] = field(default_factory=dict)
    names: Collection[str] = ()

    @property
    def trained(self) -> dict[str, nn.Module]:
        """Return the modules with parameters that an optimizer steps, by name."""
        stepped = {id(each) for each in list_stepped(self.optimizer)}
        found = self.modules.items()
        return {name: each for name, each in found if not stepped.isdisjoint(map(id, each.parameters()))}


def sort_kept(
    objects: Mapping[str, Any], accelerator: Accelerator, leave_out: Mapping[str, Collection[str]]
) -> dict[str, Any]:
    """Sort the kept objects by type.

    Returns: the fields ``model``, ``modules``, ``optimizer``, ``schedulers``, ``extras`` and ``contained``.

    A single kept module becomes the model; several modules become a ``ModuleDict`` by name.

    Args:
        leave_out: by an object's name, the names of its attributes that aren't kept.

    Raises:
        RecipeError: an object's state can't be read and restored in place.
    """
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    schedulers: dict[str, Any] = {}
    extras: dict[str, Stateful] = {}
    ties = Ties(modules)
    waiting, known = [*sorted(objects.items())], {id(each) for each in objects.values()}
    while waiting:
        name, each = waiting.pop(0)
        if isinstance(each, nn.Module) and not is_metric(each):
            modules[name] = _unwrap_module(each)
        elif isinstance(each, AcceleratedOptimizer):
            optimizers[name] = each.optimizer
        elif isinstance(each, torch.optim.Optimizer):
            optimizers[name] = each
        elif isinstance(each, AcceleratedScheduler):
            schedulers[name] = each.scheduler
        elif isinstance(each, LRScheduler | ReduceLROnPlateau):
            schedulers[name] = each
        else:
            # `keep` has checked this object already. Check it again: it may be a loader, and the loop may have begun to
            # iterate over it since then.
            refuse_inexact(f"run.keep({name}=...)", each)
            extras[name] = as_stateful(name, each, ties, leave_out.get(name, ()))
        if not waiting:
            known |= {id(each) for each in (*optimizers.values(), *schedulers.values())}
            waiting = _list_parts(modules, extras, known)
            known |= {id(each) for _, each in waiting}
    model = next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)
    # An optimizer inside another kept optimizer isn't saved separately: the outer optimizer's state contains it.
    attributes = {id(value) for each in optimizers.values() for value in vars(each).values()}
    optimizers = {name: each for name, each in optimizers.items() if id(each) not in attributes}
    optimizer: Any = next(iter(optimizers.values())) if len(optimizers) == 1 else Optimizers(optimizers)
    inside = _list_inner(extras, [*modules.values(), *parts_of(optimizer)])
    inner_modules = {name: each for name, each in inside.items() if isinstance(each, nn.Module)}
    inner_optimizers = {name: each for name, each in inside.items() if isinstance(each, torch.optim.Optimizer)}
    own: dict[str, Any] = {
        MODES: Modes(model, parts_of(optimizer), InnerModes(inner_modules, [*inner_optimizers.values()])),
        GRADIENTS: Gradients(model, optimizer, inner_modules, inner_optimizers),
        ACCUMULATION: Count(accelerator),
    }
    if inner := _find_inner(optimizers):
        own[INNER] = InnerOptimizers(inner)
    if pruned := find_pruned(model):
        own[PRUNED] = pruned
    if allocators := find_rank_allocators(model):
        own[ALLOCATORS] = allocators
    return {
        "model": model, "modules": modules, "optimizer": optimizer, "schedulers": list(schedulers.values()),
        "scheduler_names": list(schedulers),
        "extras": extras | own,
        # Objects of the user's classes load their own state, perhaps with other layers and groups than these.
        "contained": {name: each for name, each in _list_contained(extras) if inside.get(name) is each},
    }  # fmt: skip


def _unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside a compiled module, DistributedDataParallel or another wrapper; others as they are.

    To look for wrappers, accelerate loads torch's compiler and FSDP, which takes a second. Without these two, a module
    can have no wrapper of theirs.
    """
    has_wrappers = not sys.modules.keys().isdisjoint(WITH_WRAPPERS)
    if has_wrappers or isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner: nn.Module = extract_model_from_parallel(module, keep_torch_compile=False)
        return inner
    return module


def _list_parts(
    modules: Mapping[str, nn.Module], extras: Mapping[str, Any], known: Collection[int]
) -> list[tuple[str, Any]]:
    """Return the objects with a state inside kept objects without a ``state_dict``, which a checkpoint needs, too.

    Examples are an algorithm's policy, and the optimizer that is an attribute of this policy. An object is named by its
    place: ``model_policy_optimizer`` for ``model.policy.optimizer``.

    Args:
        known: the ids of the objects that are saved already.
    """
    saved = {*known, *(id(each) for module in modules.values() for each in module.modules())}
    saved |= {id(each) for _, each in _list_contained(extras)}
    owners = {
        path: each for extra in extras.values() if isinstance(extra, Objects) for path, each in extra.list_parts()
    }
    found: dict[str, Any] = {}
    for path, each in owners.items():
        inner = {}
        if isinstance(each, nn.Module) and id(each) not in saved:
            saved |= {id(part) for part in each.modules()}
            attributes = ((f"{path}.{name}", vars(part)) for name, part in each.named_modules())
            steppers = (torch.optim.Optimizer, LRScheduler, ReduceLROnPlateau)
            inner = {
                f"{owner.rstrip('.')}.{key}": value
                for owner, own in attributes
                for key, value in own.items()
                if isinstance(value, steppers)
            }
            found[path] = each
        for name, value in {path: each, **inner}.items():
            if id(value) not in saved:
                saved.add(id(value))
                found[name] = value
    return [(re.sub(r"\W+", "_", path).strip("_"), each) for path, each in found.items()]


def list_contained(recipe: Recipe) -> Mapping[str, Any]:
    """Return the modules and optimizers in a loop's kept containers, by name; empty for a recipe without a loop."""
    return recipe.contained if isinstance(recipe, Kept) else {}


def _list_inner(extras: Mapping[str, Any], outer: Sequence[Any]) -> dict[str, Any]:
    """Return the modules and optimizers in kept containers and in kept objects of the user's classes, by name.

    Args:
        outer: the modules and optimizers that are kept under names of their own.
    """
    known = {id(part) for each in outer for part in (each.modules() if isinstance(each, nn.Module) else (each,))}
    found: dict[str, Any] = {}
    for name, each in [*_list_contained(extras), *_list_attributes(extras)]:
        if isinstance(each, nn.Module | torch.optim.Optimizer) and id(each) not in known:
            known.add(id(each))
            found[name] = each
    return found


def _list_contained(extras: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects with a ``state_dict`` in kept containers, by name."""
    for extra in extras.values():
        if isinstance(originals := getattr(extra, "originals", None), Originals):
            yield from originals.list_objects()


def _list_attributes(extras: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of kept objects of the user's classes, by name."""
    for path, each in [*extras.items(), *_list_contained(extras)]:
        if is_own(type(each)) and not isinstance(each, nn.Module | torch.optim.Optimizer):
            yield from ((f"{path}.{key}", value) for key, value in read_attributes(each).items())


def list_checkpointed(accelerator: Accelerator, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by name, the objects from ``accelerator.register_for_checkpointing`` that aren't kept by ``run.keep``."""
    known = {id(each) for each in objects.values()}
    found = accelerator._custom_objects
    return {f"registered_{number}": each for number, each in enumerate(found) if id(each) not in known}


def _find_inner(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, "Inner"]:
    """Return the optimizers inside kept optimizers whose ``state_dict`` lacks the inner state, as in SAM."""
    kept = {id(each) for each in optimizers.values()}
    return {
        f"{name}.{key}": Inner(each, value)
        for name, each in optimizers.items()
        if type(each).state_dict is torch.optim.Optimizer.state_dict
        for key, value in vars(each).items()
        if isinstance(value, torch.optim.Optimizer) and id(value) not in kept
    }


class Inner:
    """The state of an optimizer that is an attribute of another optimizer. The two may share one list of groups."""

    def __init__(self, outer: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_shared = outer.param_groups is optimizer.param_groups
        if self._is_shared:
            outer.register_load_state_dict_post_hook(self._share)

    def _share(self, outer: torch.optim.Optimizer) -> None:
        self._optimizer.param_groups = outer.param_groups

    def state_dict(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        return {"state": state["state"]} if self._is_shared else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        groups = self._optimizer.param_groups
        with loading_exactly([self._optimizer]):
            self._optimizer.load_state_dict({"param_groups": self._optimizer.state_dict()["param_groups"], **state})
        lay_out_state(self._optimizer, are_saved=True)
        if self._is_shared:
            self._optimizer.param_groups = groups


class InnerOptimizers:
    """The states of optimizers that are attributes of kept optimizers, by name."""

    def __init__(self, optimizers: Mapping[str, Inner]) -> None:
        self._optimizers = dict(sorted(optimizers.items()))

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in self._optimizers.items():
            each.load_state_dict(state[name])


class Count:
    """accelerate's count of the micro-batches accumulated so far, as an object with a state."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
