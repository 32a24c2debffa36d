"""The search for plain values that a program changes and that no checkpoint has: numbers, containers, tensors.

The search compares what the program reaches at a save with what it reached when its loop began: the data with its
transforms, the variables of the user's functions, and the attributes of the user's own modules. A cheap digest stands
for each value. A value that a checkpoint has is left out, with all that shares its memory.
"""

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.data import is_torch_loader, list_samplers
from holdfast.hyperparameters import is_hyperparameter
from holdfast.location import describe_error, find_place, is_own_code
from holdfast.recipe import Recipe
from holdfast.state import is_plain, is_sharded
from holdfast.training.carried import find_carried_attributes, find_change, find_stored
from holdfast.training.digests import CONTAINERS, Reader
from holdfast.training.kept import MODES, Kept
from holdfast.training.modes import Modes
from holdfast.training.unregistered import LEAVES, SEQUENCES, find_registered, has_state, is_own_class, parts_inside

# The objects that one search enters.
MAX_OBJECTS = 2_000
# Lines of one save.
MOST_LINES = 5

MUTABLE = (Tensor, np.ndarray, *CONTAINERS)
OF_TORCH = vars(nn.Module()).keys()


@dataclass(frozen=True)
class Seen:
    """A value at one time.

    Attributes:
        name: a variable's, or an attribute's from a variable on.
        digest: stands for the value.
        place: the id of an object that can be changed in place; else 0.
        is_carried: whether the value counts, too, if another object is put in its place. That is False for what a
            module's methods assign before they read it: an output that is kept for later, say.
        remedy: how to keep the value; empty for the usual ways.
    """

    name: str
    digest: object
    place: int = 0
    is_carried: bool = True
    remedy: str = ""


@dataclass
class Values:
    """The plain values that a search has found.

    Attributes:
        seen: by the id of the object that has the value, and the value's name in it.
        owners: all objects that were entered, by id.
    """

    seen: dict[tuple[int, str], Seen] = field(default_factory=dict)
    owners: dict[int, Any] = field(default_factory=lambda: {0: None})


class Unkept:
    """The plain values of a program when its loop began."""

    def __init__(self, recipe: Recipe) -> None:
        """
        Args:
            recipe: the recipe, or what a loop keeps. Of a framework's loop nothing is looked at.
        """
        self._recipe = recipe
        self._functions: Mapping[str, list[str]] = recipe.functions if isinstance(recipe, Kept) else {}
        self._is_on = not isinstance(recipe, Kept) or bool(self._functions)
        stored = [find_stored(file, names) for file, names in self._functions.items()]
        self._stored: set[str] = set().union(*stored)
        # These are named at the beginning already.
        self._named: set[str] = {each.name for each in recipe.carried} if isinstance(recipe, Kept) else set()
        self._error = ""  # that has ended the search
        self._reader = Reader()
        self._began = {name for name, _ in self._list_variables()}
        values = self._read()
        self._seen, self._owners = values.seen, set(values.owners)  # the objects themselves may go

    def take(self) -> list[str]:
        """Return a line for each value that has changed, with the user's file and line. Each is named once."""
        lines, now = [], self._read()
        if self._error:
            error, self._error = self._error, ""
            return [f"{error}; values that change and that no checkpoint has are not looked for"]
        for key, seen in now.seen.items():
            before = self._seen.get(key)
            if seen.name in self._named or (before is not None and before.digest == seen.digest):
                continue
            is_same = before is not None and before.place == seen.place != 0
            # An object that is new itself is not looked at: what it was put into has changed.
            if (is_same or seen.is_carried) and key[0] in self._owners:
                self._named.add(seen.name)
                lines.append(self._describe(seen, now.owners[key[0]], is_same=is_same))
        more = [f"and so have {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        return lines[:MOST_LINES] + more

    def _describe(self, seen: Seen, has_it: Any, *, is_same: bool) -> str:
        owner, _, own = seen.name.rpartition(".")
        key = own.partition("[")[0]
        if not isinstance(self._recipe, Kept):
            remedy = "with an object in extras whose state_dict has it"
        elif seen.remedy:
            remedy = seen.remedy
        elif is_same or (not owner and seen.place):
            remedy = f"run.keep({key}={seen.name})"
        elif owner and getattr(has_it, "__dict__", {}) and all(map(is_plain, vars(has_it).values())):
            remedy = f"run.keep({owner.rpartition('.')[2].partition('[')[0]}=vars({owner}))"
        else:
            remedy = f'in a dict, state = {{"{key}": ...}}, and run.keep(state=state)'
        codes = _list_codes(type(has_it))
        functions = [*self._functions.items(), *((each.co_filename, [each.co_name]) for each in codes)]
        found = ((file, find_change(file, names, key)) for file, names in functions)
        place = next((f"{file}:{line}: " for file, line in found if line), None) or find_place()
        return (
            f"{place}{seen.name} has changed since the loop began, and no checkpoint has it; if a step or a sample "
            f"depends on it, keep it: {remedy}"
        )

    # ---- the search

    def _list_variables(self) -> list[tuple[str, Any]]:
        """Return the data, and the variables of the loop's functions which the loop doesn't assign."""
        recipe = self._recipe
        if not isinstance(recipe, Kept):
            return [("data", recipe.data), ("collate", recipe.collate)]
        return [(name, value) for name, value in recipe.list_variables() if name not in self._stored]

    def _read(self) -> Values:
        values = Values()
        if self._is_on:
            try:
                self._fill(values)
            except Exception as error:  # of the user's own attributes: a search may not end a run
                self._is_on, self._error, values = False, describe_error(error), Values()
        return values

    def _fill(self, values: Values) -> None:
        known = Known(self._recipe)
        variables = [(name, value) for name, value in self._list_variables() if name in self._began]
        is_of_data = {id(value) for name, value in variables if name.startswith("loader.")}
        if isinstance(self._recipe, Kept):
            waiting = deque([("", self._recipe.function, False)])
        else:
            waiting, is_of_data = deque(), {id(value) for _, value in variables}
        for name, value in variables:
            self._note(values, known, (0, name), name, value)
            waiting.append((name, value, id(value) in is_of_data))
        while waiting and len(values.owners) < MAX_OBJECTS:
            name, each, is_data = waiting.popleft()
            if id(each) in values.owners or known.has_object(each) or not _is_entered(each, is_data):
                continue
            values.owners[id(each)] = each
            for inner, part in parts_inside(name, each):
                if not isinstance(each, CONTAINERS):
                    label = inner.rpartition(".")[2]
                    if self._is_left_out(each, label):
                        continue
                    self._note(values, known, (id(each), label), inner, part)
                waiting.append((inner, part, is_data))
        if isinstance(self._recipe, Kept):
            self._read_modules(values, known, self._recipe.modules)

    def _is_left_out(self, owner: Any, label: str) -> bool:
        """Return whether the search leaves out an attribute of a library's object, or a variable of a closure."""
        if isinstance(owner, types.FunctionType):
            return label in self._stored
        is_own = is_own_class(owner if isinstance(owner, type) else type(owner))
        return label.startswith("__") or (label.startswith("_") and not is_own)

    def _note(self, values: Values, known: "Known", key: tuple[int, str], name: str, value: Any) -> None:
        digest = None if known.has(value) else self._reader.digest(value, known.has)
        if digest is not None:
            values.seen.setdefault(key, Seen(name, digest, _place_of(value)))

    def _read_modules(self, values: Values, known: "Known", modules: Mapping[str, nn.Module]) -> None:
        """Note the attributes of modules that no ``state_dict`` has, and that `Modes` doesn't restore."""
        for root, module in modules.items():
            for path, part in module.named_modules(prefix=root):
                values.owners[id(part)] = part
                carried = _find_carried(type(part))
                lost = {key: part._buffers.get(key) for key in part._non_persistent_buffers_set}
                own = vars(part).items() if carried is not None else ()
                for key, value in [*lost.items(), *((key, value) for key, value in own if key not in OF_TORCH)]:
                    if known.has(value) or is_hyperparameter(key, value) or has_state(value):
                        continue
                    digest = self._reader.digest(value, known.has)
                    if digest is not None:
                        is_carried = key in lost or key in (carried or ())
                        remedy = "" if isinstance(value, CONTAINERS) else f'register_buffer("{key}", ...) in its module'
                        values.seen[id(part), key] = Seen(f"{path}.{key}", digest, _place_of(value), is_carried, remedy)


def _find_carried(kind: type) -> set[str] | None:
    """Return the attributes that the methods of a user's class read before they assign them; None for a library's."""
    found: set[str] | None = None
    for each in kind.__mro__:
        if codes := _list_codes(each):
            found = (found or set()) | find_carried_attributes(codes[0].co_filename, each.__name__)
    return found


def _list_codes(kind: type) -> list[types.CodeType]:
    """Return the code of a class's methods, ``__init__`` last; none if the class is a library's."""
    functions = [each for each in vars(kind).values() if isinstance(each, types.FunctionType)]
    codes = [each.__code__ for each in functions if is_own_code(each.__code__.co_filename)]
    return sorted(codes, key=lambda code: (code.co_name == "__init__", code.co_firstlineno))


def _is_entered(value: Any, is_data: bool) -> bool:
    """Return whether the search enters a value: a container, a function, the user's own object, or the data's."""
    if isinstance(value, LEAVES) or has_state(value) or isinstance(value, types.ModuleType):
        return False
    if isinstance(value, (*CONTAINERS, types.FunctionType, types.MethodType, functools.partial)):
        return True
    return is_data or is_own_class(value if isinstance(value, type) else type(value))


def _place_of(value: Any) -> int:
    return id(value) if isinstance(value, MUTABLE) or has_state(value) else 0


class Known:
    """The objects and the memory that a checkpoint has."""

    def __init__(self, recipe: Recipe) -> None:
        self._ids = find_registered(recipe)
        self._memory: set[int] = set()
        self._ids |= {id(each) for each in list_samplers(recipe.data)[1:]} if is_torch_loader(recipe.data) else set()
        parts = [recipe.model, *recipe.extras.values(), *(recipe.originals if isinstance(recipe, Kept) else ())]
        for each in parts:
            if isinstance(each, nn.Module):
                self._memory |= set(map(_memory_of, [*each.parameters(), *each.state_dict(keep_vars=True).values()]))
            elif isinstance(each, MUTABLE):
                self._add(each)
        modes = recipe.extras.get(MODES)
        for tensors in modes.list_tensors().values() if isinstance(modes, Modes) else ():
            for each in tensors.values():
                self._add(each)
        for states in _list_states(recipe.optimizer):
            self._memory |= {_memory_of(each) for each in states if isinstance(each, Tensor)}
        self._ids.discard(id(None))
        self._memory.discard(0)

    def _add(self, value: Any) -> None:
        if id(value) in self._ids and not isinstance(value, MUTABLE):
            return
        if isinstance(value, Tensor | np.ndarray):
            self._memory.add(_memory_of(value))
        self._ids.add(id(value))
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, SEQUENCES) else ()
        for each in inside:
            if isinstance(each, MUTABLE) and id(each) not in self._ids:
                self._add(each)

    def has(self, value: Any) -> bool:
        """Return whether a checkpoint has a value."""
        if isinstance(value, Tensor | np.ndarray) and _memory_of(value) in self._memory:
            return True
        return id(value) in self._ids

    def has_object(self, value: Any) -> bool:
        """Return whether a checkpoint has an object, or all its attributes."""
        return self.has(value) or id(getattr(value, "__dict__", None)) in self._ids


def _list_states(optimizer: Any) -> Iterator[Iterable[Any]]:
    for part in getattr(optimizer, "parts", {"": optimizer}).values():
        for state in getattr(part, "state", {}).values():
            yield state.values() if isinstance(state, dict) else ()


def _memory_of(value: Any) -> int:
    """Return the address of the memory that a tensor or an array is a part of; 0 if it has none."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return int(value.__array_interface__["data"][0])
    if not isinstance(value, Tensor) or is_sharded(value) or value.layout is not torch.strided or value.is_meta:
        return 0
    return value.untyped_storage().data_ptr()
