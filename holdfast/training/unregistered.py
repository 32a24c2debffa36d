"""The search for unregistered state: state that a recipe's functions can reach and that no checkpoint has.

The search begins at the recipe's functions, its data and its model. It follows everything that a Python function can
name: closures, defaults, globals, bound objects, attributes and containers. It finds objects with ``state_dict`` and
``load_state_dict``, and random generators. It leaves out registered objects (model, optimizer, schedulers, extras, a
stream that keeps its position) with everything inside them, and wrappers, such as a compiled model, whose tensors are
all registered.
"""

# Over 300 lines: one search, whose rules are of no use apart.

import dis
import functools
import hashlib
import random
import re
import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast import state
from holdfast.checkpoint import Payload, serialize
from holdfast.data import is_stream, list_saved
from holdfast.location import is_own_code
from holdfast.recipe import Recipe
from holdfast.training.kept import Kept
from holdfast.training.optimizers import parts_of

# Limits of one search: objects in all, and items of one container.
MAX_OBJECTS = 20_000
MAX_ITEMS = 256

FUNCTIONS = ("loss", "step", "after_step", "evaluate", "probe", "collate")
# A checkpoint has the states of these generators already.
GLOBAL_GENERATORS = (random._inst, np.random.mtrand._rand, torch.default_generator)
SCHEDULERS = (LRScheduler, ReduceLROnPlateau, AcceleratedScheduler)
LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), Tensor, np.ndarray, np.generic, torch.dtype)
SEQUENCES = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True)
class Unregistered:
    """An object with state that no checkpoint has.

    Args:
        name: the object's name in the recipe's code, from a variable on: ``learner.target``.
        kind: the name of its class.
        reached_by: the recipe's field from which the search found it, such as ``loss``, ``data`` or ``model``.
        sha256: the SHA-256 of its state; empty if the state can't be read.
        is_generator: whether it is a generator of random numbers.
        is_copy: whether it looks like a copy of the model, such as an average or a target network.
    """

    name: str
    kind: str
    reached_by: str
    sha256: str
    is_generator: bool
    is_copy: bool

    @property
    def remedy(self) -> str:
        """Return the line for the recipe that would register the object."""
        key = re.findall(r"[^\W\d]\w*", self.name)[-1]
        if self.kind == Attribute.__qualname__:
            return f"run.keep({key}={self.name}) if it is a container, or register_buffer, or on_save_checkpoint"
        if self.is_generator and self.reached_by != "loop":
            return f'extras={{"{key}": ...}}, an object whose state_dict has the state of {self.name}'
        if self.reached_by == "loop":
            return f"run.keep({key}={self.name})"
        if self.reached_by == "model":
            return "nn.ModuleList or nn.ModuleDict in place of a plain list or dict"
        return f'extras={{"{key}": {self.name}}}'


class Attribute:
    """A plain value that an object of the user's has as an attribute, in the form of an object with state."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": list(self._value) if isinstance(self._value, deque) else self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the search reads the value only."""


def find_unregistered(recipe: Recipe) -> list[Unregistered]:
    """Return each unregistered object with state that the recipe's functions can reach."""
    ids, tensors = find_registered(recipe), _tensors_of(_registered(recipe))
    found: dict[int, tuple[str, str, Any]] = {}
    for root, start, value in _roots(recipe):
        for name, each in _walk(start, value, ids):
            # A variable's name replaces the name "self" from a method that was found before.
            is_new = id(each) not in found or (found[id(each)][0] == "self" and name != "self")
            if is_new and has_state(each) and not _is_known(each, tensors):
                found[id(each)] = (name, root, each)
    inner = {id(part) for _, _, each in found.values() for part in list(_modules(each))[1:]}
    random_parts = {_digest(each) for each in recipe.model.parameters() if found and _is_random(each)}
    return [
        _describe(name, root, each, recipe.model, random_parts)
        for key, (name, root, each) in found.items()
        if key not in inner
    ]


# ---- what is registered


def find_registered(recipe: Recipe) -> set[int]:
    """Return the ids of all objects whose state a checkpoint has, and of Holdfast's and accelerate's own."""
    own = _own_ids(recipe)
    return _ids_of(_registered(recipe), own) | own


def _registered(recipe: Recipe) -> list[Any]:
    parts: list[Any] = [recipe.optimizer, *parts_of(recipe.optimizer), recipe.schedule]
    parts += [*GLOBAL_GENERATORS, *torch.cuda.default_generators]
    if isinstance(recipe, Kept):
        originals = (each for each in recipe.originals if id(each) not in _own_ids(recipe))
        parts += [*originals, *recipe.schedulers]
    for part in (recipe.model, *(extra for extra in recipe.extras.values() if id(extra) not in _own_ids(recipe))):
        parts += [part, *_modules(part)]
    if recipe.batch_size is None:
        parts += list_saved(recipe.data)
    elif is_stream(recipe.data) and hasattr(recipe.data, "state_dict"):
        parts.append(recipe.data)
    return parts


def _own_ids(recipe: Recipe) -> set[int]:
    """Return the ids of Holdfast's and accelerate's own objects, which are neither reported nor entered."""
    return {id(each) for each in recipe.own} if isinstance(recipe, Kept) else set()


def _modules(value: Any) -> Iterator[nn.Module]:
    return value.modules() if isinstance(value, nn.Module) else iter(())


def _ids_of(parts: list[Any], own: set[int]) -> set[int]:
    """Return the ids of the parts and of all objects with state inside them, but not inside objects of ``own``."""
    ids = {id(part) for part in parts}
    for part in parts:
        # For a module `_modules` has listed its submodules. A module in a plain list is not saved with its owner.
        if not isinstance(part, nn.Module):
            inside = (each for _, each in _walk("", part, own, is_inside=True) if has_state(each))
            # A scheduler saves no optimizer.
            is_scheduler = isinstance(part, SCHEDULERS)
            ids |= {id(each) for each in inside if not (is_scheduler and isinstance(each, torch.optim.Optimizer))}
    return ids


def _tensors_of(parts: list[Any]) -> set[int]:
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}


def _is_known(value: Any, tensors: set[int]) -> bool:
    """Return whether a value is a module whose tensors, if any, are all registered."""
    if not isinstance(value, nn.Module):
        return False
    return {id(tensor) for tensor in (*value.parameters(), *value.buffers())} <= tensors


# ---- the search


def _roots(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """Yield each object at which the search begins, after its root (for `reached_by`) and its name."""
    own = _own_ids(recipe)
    if isinstance(recipe, Kept):
        yield "loop", "loop", recipe.function
        yield from (("loop", name, value) for name, value in recipe.list_variables() if id(value) not in own)
    for field in (*FUNCTIONS, "schedule", "data"):
        yield field, field, getattr(recipe, field)
    for name, module in recipe.model.named_modules():
        yield "model", f"model.{name}" if name else "model", module
    yield from (("extras", name, extra) for name, extra in recipe.extras.items() if id(extra) not in own)


def _walk(root: str, value: Any, registered: set[int], *, is_inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the objects that can be reached from a value, nearest first, each after its name.

    The search doesn't enter an object with state, because such an object saves its own parts.

    Args:
        registered: ids of objects that are neither yielded nor entered.
        is_inside: enter objects with state, but no functions.
    """
    waiting = deque([("" if isinstance(value, types.FunctionType | functools.partial) else root, value)])
    seen = {id(value)}
    while waiting and len(seen) < MAX_OBJECTS:
        name, each = waiting.popleft()
        if id(each) not in registered:
            yield name, each
        is_end = id(each) in registered and each is not value
        if is_end or (has_state(each) and each is not value and not is_inside):
            continue
        for inner, part in parts_inside(name, each, is_inside):
            if id(part) not in seen and not isinstance(part, LEAVES):
                seen.add(id(part))
                waiting.append((inner, part))


def parts_inside(name: str, value: Any, is_inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what can be named from an object, in one step, each after its name.

    Args:
        is_inside: leave out the variables of functions and the attributes of classes.
    """
    if isinstance(value, types.FunctionType):
        yield from () if is_inside else _variables(value)
    elif isinstance(value, types.MethodType):
        yield name.rpartition(".")[0] or "self", value.__self__
        yield name, value.__func__
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name}.args[{index}]", each) for index, each in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", each) for key, each in _first(value.items()))
    elif isinstance(value, SEQUENCES):
        yield from ((f"{name}[{index}]", each) for index, each in enumerate(_first(value)))
    elif isinstance(value, type):
        yield from () if is_inside or not is_own_class(value) else _attributes(name, vars(value))
    elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType | types.CodeType):
        yield from _attributes(name, getattr(value, "__dict__", {}))
        slots = (slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ()))
        yield from _attributes(name, {slot: getattr(value, slot, None) for slot in slots})
        if not is_inside:
            yield from ((name, kind) for kind in type(value).__mro__ if is_own_class(kind))


def _attributes(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in list(values.items()):
        if isinstance(value, staticmethod | classmethod | property):
            value = getattr(value, "__func__", None) or getattr(value, "fget", None)
        yield (f"{name}.{key}" if name else key), value


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function can name, except its locals and the globals of a library."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable isn't assigned yet
            continue
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(reversed(parameters), reversed(function.__defaults__ or ()), strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((name, value) for name, value in vars(function).items() if name == "__wrapped__")
    if is_own_code(function.__code__.co_filename):
        yield from _globals(function.__code__, function.__globals__)


def _globals(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for name in sorted(names & variables.keys()):
        value = variables[name]
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif is_own_code(getattr(value, "__file__", None) or "<"):
            yield from ((f"{name}.{key}", vars(value)[key]) for key in code.co_names if key in vars(value))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals(inner, variables)


def _first(values: Any) -> list[Any]:
    return [value for value, _ in zip(values, range(MAX_ITEMS), strict=False)]


def is_own_class(kind: type) -> bool:
    """Return whether a class is the user's, by the file of its first function."""
    code = next((each.__code__ for each in vars(kind).values() if isinstance(each, types.FunctionType)), None)
    return code is not None and is_own_code(code.co_filename)


# ---- what is found


def has_state(value: Any) -> bool:
    """Return whether an object is a generator of random numbers, or has ``state_dict`` and ``load_state_dict``."""
    # A loader that accelerate has prepared has the methods, but no state of its own.
    if isinstance(value, type | types.ModuleType | random.SystemRandom | DataLoaderStateMixin):
        return False
    kind = type(value)
    return state.is_generator(value) or (
        callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
    )


def _describe(name: str, root: str, value: Any, model: nn.Module, random_parts: set[str]) -> Unregistered:
    is_generator = state.is_generator(value)
    is_copy = not is_generator and _is_copy(value, model, random_parts)
    return Unregistered(name, type(value).__qualname__, root, _digest(value), is_generator, is_copy)


def _read(value: Any) -> Any:
    if state.is_generator(value):
        return state.read_generator(value)
    return value if isinstance(value, Tensor) else value.state_dict()


def _payload(value: Any) -> Payload | None:
    """Return an object's state as a payload; None if reading it raises any error."""
    try:
        return state.to_payload(_read(value))
    except Exception:
        return None


def _digest(value: Any) -> str:
    """Return the SHA-256 of an object's state; empty if the state can't be read."""
    payload = _payload(value)
    return "" if payload is None else hashlib.sha256(b"".join(map(bytes, serialize(payload)))).hexdigest()


def _is_copy(value: Any, model: nn.Module, random_parts: set[str]) -> bool:
    """Return whether an object has tensors of all the model's shapes, or is a module that copies a part of the model.

    Such an object, an average or a target network, matters even if it doesn't change for thousands of steps. A part
    counts as a copy if its random parameters are equal to the bit; two fresh layer norms are equal by construction.
    """
    payload = _payload(value)
    tensors = payload.tensors if payload else {}
    shapes, wanted = (Counter(tuple(each.shape) for each in these) for these in (tensors.values(), model.parameters()))
    own = [each for each in value.parameters() if _is_random(each)] if isinstance(value, nn.Module) else []
    return (bool(wanted) and wanted <= shapes) or (bool(own) and {*map(_digest, own)} <= random_parts)


def _is_random(tensor: Tensor) -> bool:
    whole = state.gather_whole(tensor)
    return whole.numel() > 1 and bool((whole != whole.flatten()[0]).any())
