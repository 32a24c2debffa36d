"""The objects, and the tensors' memory, whose values a checkpoint contains."""

import random
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast import state
from holdfast.data import is_stream, is_torch_loader, list_samplers, list_saved
from holdfast.recipe import Recipe
from holdfast.state.slots import read_attributes
from holdfast.training.forgotten_state.digests import CONTAINERS
from holdfast.training.forgotten_state.reach import list_attributes, list_inner_values
from holdfast.training.kept import Kept
from holdfast.training.optimizers import parts_of

MAX_OBJECTS = 5_000
GLOBAL_GENERATORS = (random._inst, np.random.mtrand._rand, torch.default_generator)
SCHEDULERS = (LRScheduler, ReduceLROnPlateau, AcceleratedScheduler)
FUNCTIONS = (types.FunctionType, types.MethodType, types.ModuleType)
MUTABLE = (Tensor, np.ndarray, *CONTAINERS)


def has_state(value: Any) -> bool:
    """Return whether an object is a generator of random numbers, or has ``state_dict`` and ``load_state_dict``."""
    # A loader prepared by accelerate has these methods, but no state.
    if isinstance(value, type | random.SystemRandom | DataLoaderStateMixin):
        return False
    kind = type(value)
    return state.is_generator(value) or (
        callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
    )


def own_ids(recipe: Recipe) -> set[int]:
    """Return the ids of Holdfast's and accelerate's own objects, which the search neither reports nor looks into."""
    return {id(each) for each in recipe.own} if isinstance(recipe, Kept) else set()


class Registered:
    """The objects, and the memory of the tensors, whose values a checkpoint of a recipe contains."""

    def __init__(self, recipe: Recipe) -> None:
        self._own = own_ids(recipe)
        self._ids = set(self._own)
        self._memory: set[int] = set()
        self._held: list[Any] = []  # keeps objects alive, so that their ids stay unique
        for part in _list_registered(recipe, self._own):
            self._add(part)
        self._memory.discard(0)
        self._ids -= {id(None), id(True), id(False)}

    def has(self, value: Any) -> bool:
        """Return whether a checkpoint contains a value, or all attributes of the value."""
        if isinstance(value, Tensor | np.ndarray) and _memory_of(value) in self._memory:
            return True
        return id(value) in self._ids or id(getattr(value, "__dict__", None)) in self._ids

    def has_tensors(self, module: nn.Module) -> bool:
        """Return whether a checkpoint contains all tensors of a module; True for a module without tensors."""
        return all(map(self.has, (*module.parameters(), *module.buffers())))

    def _add(self, part: Any) -> None:
        self._held.append(part)
        self._ids.add(id(part))
        if isinstance(part, nn.Module):
            self._ids |= {id(each) for each in part.modules()}
            tensors = [*part.parameters(), *list_tensors_in(part.state_dict(keep_vars=True))]
            self._memory |= {_memory_of(each) for each in tensors}
        elif isinstance(part, MUTABLE):
            self._add_value(part)
        else:
            self._add_inside(part)
        if isinstance(part, torch.optim.Optimizer):
            self._memory |= {_memory_of(each) for each in list_tensors_in(list(part.state.values()))}

    def _add_value(self, value: Any) -> None:
        """Register a container and all its items, or a tensor's memory."""
        if isinstance(value, Tensor | np.ndarray):
            self._memory.add(_memory_of(value))
        self._ids.add(id(value))
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, CONTAINERS) else ()
        for each in inside:
            if id(each) not in self._ids and (isinstance(each, MUTABLE) or has_state(each)):
                self._add_value(each)

    def _add_inside(self, part: Any) -> None:
        """Register the objects with a state inside a registered object, whose own state contains these states."""
        waiting, seen = deque([part]), {id(part): part}
        while waiting and len(seen) < MAX_OBJECTS:
            each = waiting.popleft()
            inner = list_inner_values("", each) if isinstance(each, CONTAINERS) else list_attributes("", each)
            for value in (found.value for found in inner if not isinstance(found.value, type)):
                if id(value) in seen or id(value) in self._own or isinstance(value, FUNCTIONS):
                    continue
                seen[id(value)] = value
                is_schedulers_own = isinstance(part, SCHEDULERS) and isinstance(value, torch.optim.Optimizer)
                if has_state(value) and not is_schedulers_own and not isinstance(value, nn.Module):
                    self._ids.add(id(value))
                    self._held.append(value)
                if isinstance(value, CONTAINERS) or hasattr(value, "__dict__"):
                    waiting.append(value)


def _list_registered(recipe: Recipe, own: set[int]) -> Iterator[Any]:
    yield from (recipe.model, recipe.optimizer, *parts_of(recipe.optimizer))
    yield from recipe.schedule if isinstance(recipe.schedule, list | tuple) else [recipe.schedule]
    yield from (*GLOBAL_GENERATORS, *torch.cuda.default_generators)
    yield from (each for each in recipe.extras.values() if id(each) not in own)
    if isinstance(recipe, Kept):
        yield from (each for each in recipe.originals if id(each) not in own)
        yield from (*recipe.schedulers, *recipe.modules.values())
    if recipe.batch_size is None:
        yield from list_saved(recipe.data)
    elif is_stream(recipe.data) and hasattr(recipe.data, "state_dict"):
        yield recipe.data
    if is_torch_loader(recipe.data):
        # only a sampler's plain attributes are saved: a dataset in it keeps its own generators
        attributes = (each for sampler in list_samplers(recipe.data)[1:] for each in read_attributes(sampler).values())
        yield from (each for each in attributes if isinstance(each, MUTABLE) or has_state(each))


def list_tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value and in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, CONTAINERS):
        for each in value.values() if isinstance(value, dict) else value:
            yield from list_tensors_in(each)


def _memory_of(value: Any) -> int:
    """Return the address of the memory block of a tensor or an array; 0 for any other value."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return int(value.__array_interface__["data"][0])
    if is_lazy(value) or state.is_sharded(value) or value.layout is not torch.strided or value.is_meta:
        return 0
    return int(value.untyped_storage().data_ptr())
