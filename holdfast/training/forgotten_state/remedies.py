"""Advice for the user's code: the line of Python that makes checkpoints contain a value."""

import contextlib
import functools
import keyword
import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast import state
from holdfast.checkpoint.found import ENDED, ITERATOR
from holdfast.provenance.ownership import is_own
from holdfast.state.objects import can_keep
from holdfast.state.slots import read_attributes
from holdfast.training.forgotten_state.digests import CACHES, CONTAINERS, has_digest, is_iterator
from holdfast.training.forgotten_state.registered import has_state
from holdfast.training.kept import FRAMEWORK


@dataclass
class At:
    """A value that the search has reached, and its place in the program.

    Attributes:
        root: the recipe's field from which the search reached the value, or `LOOP`.
        owner: the object that has the value; the function of a closure's or a default value; None for other variables.
        depth: the number of nested library objects between the value and the first object of the user's that contains
            it.
        place: the file and line for the report, as in `Found.place`; empty if the search hasn't found them yet.
        is_noted: whether the value is reported if it is a plain value.
        is_log: whether the value belongs to a logger, a meter or a timer.
        parent: the value from which the search has come to this one; None for a root.
    """

    root: str
    name: str
    value: Any
    owner: Any = None
    depth: int = 0
    place: str = ""
    is_noted: bool = True
    is_log: bool = False
    parent: "At | None" = field(default=None, repr=False)


@dataclass
class Scope:
    """The names that a line before a loop can use.

    Attributes:
        variables: the variables of the running functions around the loop, and their modules' globals, by name.
        kept: the names that are kept already.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    kept: Collection[str] = ()

    def spell(self, at: At) -> str:
        """Return an expression for a value in the scope; empty if there is none."""
        if at.root == FRAMEWORK or not at.name or self._leads_to(at.name, at.value):
            return at.name
        if found := self.find_name(at.value):
            return found
        parent = self.spell(at.parent) if at.parent is not None else ""
        if parent and isinstance(at.owner, types.FunctionType):
            return next((f"{parent}.{each}" for each, value in _list_bound(at.owner) if value is at.value), "")
        rest = at.name.removeprefix(at.parent.name) if at.parent is not None else ""
        is_inside = parent and rest != at.name and rest.startswith((".", "["))
        return f"{parent}{rest}" if is_inside else ""

    def find_name(self, value: Any) -> str:
        """Return the name of a variable that has a value, or of a loader's dataset or function; empty without one."""
        if not isinstance(value, DataLoader) and type(value) in (int, float, bool, str, bytes, type(None)):
            return ""
        name = next((name for name, each in self.variables.items() if each is value), "")
        loaders = ((name, each) for name, each in self.variables.items() if isinstance(each, DataLoader))
        parts = (f"{name}.{key}" for name, each in loaders for key in LOADER_PARTS if getattr(each, key) is value)
        return name or next(parts, "")

    def _leads_to(self, name: str, value: Any) -> bool:
        """Return whether a name such as ``box.parts[0]`` leads to a value, without a call of the user's code."""
        first, *rest = re.findall(r"\[(?:'[^']*'|[^\]]*)\]|[^.\[\]]+", re.sub(r" #\d+$", "", name))
        if first not in self.variables:
            return False
        found = self.variables[first]
        for part in rest:
            if part.startswith("["):
                items = found if isinstance(found, dict) else dict(enumerate(found)) if _is_sequence(found) else {}
                found = next((each for key, each in items.items() if repr(key) == part[1:-1]), None)
            else:
                found = _read(found, part)
        return found is value or (not isinstance(value, _MUTABLE) and type(found) is type(value) and found == value)

    def choose_keyword(self, name: str) -> str:
        """Return a keyword for `Run.keep` or a key of ``extras`` that isn't kept already, made from a value's name."""
        parts: list[str] = [each.strip("_") for each in re.findall(r"[^\W\d]\w*", re.sub(r"\[.*?\]| #\d+", "", name))]
        parts = [each for each in parts if each and not keyword.iskeyword(each)] or ["value"]
        choices = [parts[-1], "_".join(parts[-2:]), *(f"{parts[-1]}_{number}" for number in range(2, 99))]
        return next(each for each in choices if each not in self.kept)


def _list_bound(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values of a function's closure and defaults, each after the expression that reads it."""
    for number, cell in enumerate(function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # the variable isn't assigned yet
            yield f"__closure__[{number}].cell_contents", cell.cell_contents
    yield from ((f"__defaults__[{number}]", each) for number, each in enumerate(function.__defaults__ or ()))
    yield from ((f"__kwdefaults__[{key!r}]", each) for key, each in (function.__kwdefaults__ or {}).items())


LOADER_PARTS = ("dataset", "collate_fn")
_MUTABLE = (Tensor, np.ndarray, nn.Module, *CONTAINERS)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, CONTAINERS) and not isinstance(value, dict | set | frozenset)


def _read(owner: Any, key: str) -> Any:
    """Return an attribute without a call of the user's code; None if the object has no attribute of this name."""
    if isinstance(owner, functools.partial):
        return getattr(owner, key, None)
    inner = (getattr(owner, name, {}) for name in ("_modules", "_buffers")) if isinstance(owner, nn.Module) else ()
    classes = [vars(kind) for kind in (owner if isinstance(owner, type) else type(owner)).__mro__]
    return next((each[key] for each in (read_attributes(owner), *inner, *classes) if key in each), None)


def find_remedy(at: At, scope: Scope, *, is_loop: bool, is_kept: bool, is_assigned: bool) -> str:
    """Return the line to add to the user's code, so that checkpoints contain a value.

    Words for the reader are in a comment at the line's end, so that the whole line can be pasted.

    Args:
        is_loop: whether the value belongs to a loop; False if it belongs to a recipe.
        is_kept: whether a checkpoint contains the value's owner, such as a module with this attribute.
        is_assigned: whether a function other than ``__init__`` assigns the value.
    """
    name = scope.choose_keyword(at.name)
    if at.root in (ITERATOR, ENDED) and at.name.startswith("enumerate(run.batches("):
        return "write enumerate(run.batches(), run.batch_number): after a resume the index begins at 0 again"
    if at.root in (ITERATOR, ENDED):
        return "the iterator begins anew after a resume: count with the step.number of `for step in run.steps()`"
    if (found := _find_buffer(at, is_kept=is_kept)) and at.root != FRAMEWORK:
        return found
    if not is_loop:
        return _find_extra(at, name)
    if at.root == FRAMEWORK:
        return f"run.keep({name}={at.name}) if it is a container, or register_buffer, or on_save_checkpoint"
    if isinstance(at.value, CACHES):
        return "keep nothing if the results follow from the arguments; otherwise keep the results in a dict"
    if isinstance(at.value, types.GeneratorType) or is_iterator(at.value):
        return "keep the loader or the data that the iterator reads"
    expression = scope.spell(at)
    if has_state(at.value) or isinstance(at.value, (*CONTAINERS, Tensor, np.ndarray)):
        if not expression:
            return f"run.keep({name}={last_part(at.name)})  # where {last_part(at.name)} is made"
        is_late = at.owner is not None and is_assigned and state.is_generator(at.value)
        return f"run.keep({name}={expression})" + ("  # create the generator first if it is None" if is_late else "")
    owner = expression.rpartition(".")[0] if at.owner is not None else ""
    if owner and _is_kept_by_attributes(at.owner, last_part(at.name)):
        return f"run.keep({scope.choose_keyword(owner)}=vars({owner}))"
    if owner and isinstance(at.owner, nn.Module) and not is_kept:
        return f"run.keep({scope.choose_keyword(owner)}={owner})"
    if expression and not has_digest(at.value):  # an object with new attributes
        return f"run.keep({name}={f'vars({expression})' if can_keep(vars(at.value)) else expression})"
    holder, old = scope.choose_keyword("state"), expression or last_part(at.name)
    words = f'use {holder}["{name}"] in place of {at.name}'
    return f'{holder} = {{"{name}": {old}}}; run.keep({holder}={holder})  # {words}'


def _find_buffer(at: At, *, is_kept: bool) -> str:
    """Return the line that registers a buffer; empty unless the value is a number or a tensor of the user's module."""
    if not isinstance(at.owner, nn.Module) or not is_own(type(at.owner)) or not is_kept:
        return ""
    kind, key = type(at.owner).__name__, last_part(at.name)
    if isinstance(at.value, Tensor):
        dtype = "" if at.value.dtype is torch.float32 else f", dtype={at.value.dtype}"
        zeros = f"torch.zeros({tuple(at.value.shape)}{dtype})"
        words = ", without persistent=False" if key in at.owner._non_persistent_buffers_set else ""
        return f'self.register_buffer("{key}", {zeros})  # in {kind}.__init__{words}'
    if isinstance(at.value, bool | int | float):
        return f'self.register_buffer("{key}", torch.tensor({type(at.value)()!r}))  # in {kind}.__init__'
    return ""


def _find_extra(at: At, name: str) -> str:
    if at.root == "model" and isinstance(at.value, nn.Module):
        return "use nn.ModuleList or nn.ModuleDict in place of a plain list or dict"
    is_object = has_state(at.value) and not state.is_generator(at.value)
    what = at.name if is_object else f"..., an object whose state_dict has {at.name}"
    return f'extras={{"{name}": {what}}}'


def _is_kept_by_attributes(owner: Any, key: str) -> bool:
    """Return whether ``run.keep(name=vars(owner))`` keeps an attribute."""
    attributes = {} if isinstance(owner, nn.Module | type) else getattr(owner, "__dict__", {})
    return key in attributes and can_keep(attributes)


def last_part(name: str) -> str:
    """Return the last identifier in a name: ``heads`` for ``model.heads[0]``."""
    found = re.findall(r"[^\W\d]\w*", re.sub(r"\[.*?\]| #\d+", "", name))
    return str(found[-1]) if found else "value"
