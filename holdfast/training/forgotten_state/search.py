"""The search for forgotten state: values that a program can reach and no checkpoint contains, each with a digest.

The search begins at a recipe's functions, data, model and optimizer, or at the variables that a loop carries. It
follows everything that a Python function can name: closures, defaults, globals, bound objects, attributes, containers,
hooks and iterators. It leaves out the values that a checkpoint contains.

A found value needn't be a fault: most of these values are constants, caches and logs. If a run didn't continue exactly,
the reason is among those values that differ between the uninterrupted process and the resumed process; see
`holdfast.checkpoint.found.find_suspects`.
"""

import dis
import functools
import re
import types
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import state
from holdfast.checkpoint import digest_payload
from holdfast.checkpoint.found import FIRST, GENERATORS, LOGS, NUMBERS, OTHERS, Found
from holdfast.provenance.hyperparameters import is_hyperparameter
from holdfast.provenance.location import find_frames
from holdfast.provenance.ownership import is_own
from holdfast.recipe import Recipe
from holdfast.training.forgotten_state.carried import find_outputs
from holdfast.training.forgotten_state.digests import SCALARS, digest, has_digest, is_logger
from holdfast.training.forgotten_state.reach import (
    InnerValue,
    is_entered,
    is_holdfasts,
    is_transparent,
    list_codes,
    list_inner_values,
)
from holdfast.training.forgotten_state.registered import Registered, has_state, list_tensors_in, own_ids
from holdfast.training.forgotten_state.remedies import At, Scope, find_remedy, last_part
from holdfast.training.kept import LOOP, Kept
from holdfast.training.optimizers import parts_of

# Limits of one search: the number of objects, the number of reported values, and the nesting of libraries' objects.
MAX_OBJECTS = 20_000
MAX_FOUND = 10_000
MAX_FOREIGN = 2

FUNCTIONS = ("loss", "step", "after_step", "evaluate", "probe", "collate")
MODULES = (nn.Module, torch.optim.Optimizer)
NUMERIC = (int, float, np.generic, np.ndarray, Tensor)


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        looked_at: the number of the user's functions, classes and objects whose inner values were searched.
    """

    found: list[Found]
    looked_at: int


def find_forgotten(recipe: Recipe) -> Searched:
    """Search for the values that a recipe or a loop can reach and that no checkpoint contains. Return them."""
    search = _Search(recipe)
    search.run()
    return Searched(search.describe(), search.looked_at)


def find_holder(recipe: Recipe, parameter: Tensor) -> Found | None:
    """Return the module that contains a parameter, if no checkpoint contains that module; otherwise None."""
    search = _Search(recipe)
    search.run()
    return search.find_holder(parameter)


def find_copies(recipe: Recipe) -> list[tuple[Found, list[Tensor]]]:
    """Return the modules, and the copies of the model's weights, that no checkpoint contains, each with its tensors.

    A copy of the weights is a list, tuple or dict with one tensor for each parameter of a kept module, in its shape.
    """
    search = _Search(recipe, has_digests=False)
    search.run()
    outer = [at for at in search.list_outer() if isinstance(at.value, nn.Module)]
    modules: list[tuple[At, list[Tensor]]]
    modules = [(at, [*at.value.parameters(), *at.value.buffers()]) for at in outer]
    wanted = _list_shapes_of_modules(recipe)
    copies = [(at, tensors) for at, tensors in search.list_containers() if _list_shapes(tensors) in wanted]
    return [(search.describe_one(at), tensors) for at, tensors in (*modules, *copies)]


def _list_shapes_of_modules(recipe: Recipe) -> list[list[tuple[int, ...]]]:
    """Return the sorted shapes of the parameters, and of the trained parameters, of each module with several."""
    modules = recipe.modules.values() if isinstance(recipe, Kept) else [recipe.model]
    parameters = [[*module.parameters()] for module in modules]
    trained = [[each for each in one if each.requires_grad] for one in parameters]
    return [_list_shapes(each) for each in (*parameters, *trained) if len(each) > 1]


def _list_tensors(container: Any) -> list[Tensor]:
    values = container.values() if isinstance(container, dict) else container
    return [each for each in values if isinstance(each, Tensor)]


def _list_tensors_inside(value: Any) -> list[Tensor]:
    """Return the tensors in an object's state; none if its ``state_dict`` raises."""
    try:
        return [*list_tensors_in(value.state_dict())]
    except Exception:
        return []


def _list_shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return sorted(tuple(each.shape) for each in tensors)


def _find_scope(recipe: Recipe) -> Scope:
    """Return the names that a line before a loop can use; for a recipe, the names of its extras."""
    if not isinstance(recipe, Kept):
        return Scope(kept=[*recipe.extras])
    found: dict[str, Any] = {}
    for frame in reversed(find_frames(recipe.function)):
        found = {**frame.f_globals, **found, **frame.f_locals}
    return Scope(found, recipe.names)


def _list_roots(recipe: Recipe, scope: Scope) -> Iterator[At]:
    own = own_ids(recipe)
    if isinstance(recipe, Kept):
        yield At(LOOP, "", recipe.function)
        variables = (each for each in recipe.list_variables() if id(each.value) not in own)
        for each in variables:
            name = each.name if each.name in scope.variables else scope.find_name(each.value) or each.name
            yield At(each.root, name, each.value, place=each.place)
        yield from (At("schedule", "", getattr(each, "lr_lambdas", None), is_noted=False) for each in recipe.schedulers)
    for field in (*FUNCTIONS, "schedule", "data"):
        if (value := getattr(recipe, field)) is not None:
            yield At(field, "" if isinstance(value, types.FunctionType) else field, value)
    modules = recipe.modules if isinstance(recipe, Kept) else {"model": recipe.model}
    for prefix, module in modules.items():
        yield from (At("model", name, each) for name, each in module.named_modules(prefix=prefix))
        for name, parameter in module.named_parameters(prefix=prefix):
            for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                yield At("model", name, getattr(parameter, key, None), is_noted=False)
            yield from (At("model", f"{name}.{key}", each, parameter) for key, each in vars(parameter).items())
    yield from (At("optimizer", "optimizer", each) for each in parts_of(recipe.optimizer))
    for name, extra in recipe.extras.items():
        if id(extra) not in own:
            yield At("extras", name, extra)
    everywhere = vars(torch.nn.modules.module).items()
    yield from (At("model", key, each, is_noted=False) for key, each in everywhere if key.startswith("_global_"))


class _Search:
    """One search.

    Attributes:
        looked_at: see `Searched`.
    """

    def __init__(self, recipe: Recipe, *, has_digests: bool = True) -> None:
        """
        Args:
            has_digests: whether to read plain values. If not, only objects with a state are found.
        """
        self._recipe, self._has_digests = recipe, has_digests
        self._scope = _find_scope(recipe)
        self._registered = Registered(recipe)
        self._waiting: deque[At] = deque()
        # the values whose inner values are searched, by id; an id is unique only as long as its object exists
        self._seen: dict[int, At] = {}
        self._codes: dict[types.CodeType, None] = {}
        # the values found so far, with their digests, by root and name
        self._plain: dict[tuple[str, str], tuple[At, str]] = {}
        self._stateful: dict[int, At] = {}
        self.looked_at = 0

    def run(self) -> None:
        """Search all reachable values."""
        for at in _list_roots(self._recipe, self._scope):
            is_registered = self._registered.has(at.value)
            # A module, an optimizer or an extra may have attributes that its own state doesn't save.
            if is_registered and state.is_metric(at.value):
                continue
            if is_registered and (isinstance(at.value, MODULES) or (at.root == "extras" and is_own(type(at.value)))):
                self._enter(at)
            else:
                self._meet(at)
        while self._waiting and len(self._seen) < MAX_OBJECTS:
            self._look_into(self._waiting.popleft())

    def find_holder(self, parameter: Tensor) -> Found | None:
        """Return the outermost module that contains a parameter."""
        modules = [at for at in self.list_outer() if isinstance(at.value, nn.Module)]
        holders = [at for at in modules if any(each is parameter for each in at.value.parameters())]
        return self.describe_one(holders[0]) if holders else None

    def list_outer(self) -> list[At]:
        """Return the found objects with a state, without modules that are inside other found modules."""
        inner = {id(part) for at in self._stateful.values() for part in _list_inner(at.value)}
        return [at for key, at in self._stateful.items() if key not in inner]

    def list_containers(self) -> list[tuple[At, list[Tensor]]]:
        """Return the lists, tuples and dicts of tensors that no checkpoint contains, each with its tensors."""
        containers = [at for at in self._seen.values() if isinstance(at.value, list | tuple | dict) and at.is_noted]
        pairs = [(at, _list_tensors(at.value)) for at in containers]
        return [(at, tensors) for at, tensors in pairs if tensors and not self._may_be_saved(at, tensors)]

    def _may_be_saved(self, at: At, tensors: list[Tensor]) -> bool:
        """Return whether a checkpoint contains the tensors, or an object around them may save copies of them."""
        if any(map(self._registered.has, tensors)):
            return True
        while at.parent is not None:
            at = at.parent
            if self._registered.has(at.value) and has_state(at.value) and not isinstance(at.value, MODULES):
                saved = Counter(_list_shapes(_list_tensors_inside(at.value)))
                return Counter(_list_shapes(tensors)) <= saved
        return False

    def describe_one(self, at: At) -> Found:
        """Return the description of an object, without a digest."""
        return self._describe(at, "", is_plain=False)

    def describe(self) -> list[Found]:
        """Return the values that were found, objects with a state first."""
        outer = self.list_outer()
        rows = [(at, _digest_state(at.value), False) for at in outer]
        rows += [(at, sha256, True) for at, sha256 in self._plain.values()]
        return [self._describe(at, sha256, is_plain=is_plain) for at, sha256, is_plain in rows[:MAX_FOUND]]

    def _describe(self, at: At, sha256: str, *, is_plain: bool) -> Found:
        place, is_assigned = self._find_place(at)
        is_module = isinstance(at.value, MODULES)
        is_kept = at.owner is not None and self._registered.has(at.owner)
        is_loop = isinstance(self._recipe, Kept)
        return Found(
            name=at.name, kind=type(at.value).__qualname__, reached_by=at.root, place=at.place or place,
            remedy=find_remedy(at, self._scope, is_loop=is_loop, is_kept=is_kept, is_assigned=is_assigned),
            sha256=sha256, is_plain=is_plain, is_module=is_module, is_assigned=is_assigned, order=_find_order(at),
        )  # fmt: skip

    def _enter(self, at: At) -> None:
        if id(at.value) not in self._seen:
            self._seen[id(at.value)] = at
            self._waiting.append(at)

    def _meet(self, at: At) -> None:
        """Record a value as found, and queue it if it is to be searched inside. Skip it if a checkpoint contains it."""
        value = at.value
        if is_holdfasts(value) or (not isinstance(value, SCALARS) and self._registered.has(value)):
            return
        is_skeleton = isinstance(value, nn.Module) and (self._registered.has_tensors(value) or _has_no_data(value))
        if has_state(value) and not is_skeleton:
            known = self._stateful.get(id(value))
            # If the object was reached first from its own method, it is named "self". A variable's name is better.
            if known is None or (known.name == "self" and at.name != "self"):
                self._stateful[id(value)] = at
            return
        if self._has_digests and at.is_noted and has_digest(value) and (sha256 := digest(value, self._registered.has)):
            self._note(at, sha256)
        if is_entered(value):
            self._enter(at)

    def _note(self, at: At, sha256: str) -> None:
        """Record a plain value as found. A second value of the same name gets a number after its name."""
        key, number = (at.root, at.name), 1
        while key in self._plain and self._plain[key][1] != sha256:
            number += 1
            key = at.root, f"{at.name} #{number}"
        self._plain.setdefault(key, (replace(at, name=key[1]), sha256))

    def _look_into(self, at: At) -> None:
        value = at.value
        is_object = not isinstance(value, type | types.FunctionType)
        kinds = type(value).__mro__ if is_object else (value,)
        codes = [code for each in kinds if is_own(each) for code in list_codes(each)]
        is_users = is_own(kinds[0])
        self.looked_at += is_users
        self._codes |= dict.fromkeys(codes)
        depth = 0 if is_users else at.depth + (not is_transparent(value))
        left_out = set() if isinstance(value, types.FunctionType) else find_outputs(codes)
        if at.root == "extras" and self._registered.has(value):
            left_out |= _list_saved_names(value)
        # A private attribute counts as a library's attribute if the object's class is from a library or has a base
        # class from a library, unless the user's code names the attribute.
        named = {name for code in codes for name in code.co_names}
        is_alone = is_users and all(is_own(each) for each in kinds if each is not object)
        labels = []
        for part in self._list_parts(at):
            is_private = part.label.startswith("_") and not is_alone and part.label not in named
            is_noted = part.is_noted and not is_private and depth < MAX_FOREIGN
            if is_noted and (part.label in left_out or self._is_restored(value, part)):
                continue
            labels += [part.label] if is_noted else []
            is_log = at.is_log or is_logger(last_part(at.name), value) or is_logger(part.label, part.value)
            self._meet(At(at.root, part.name, part.value, value, depth, is_noted=is_noted, is_log=is_log, parent=at))
        if is_users and is_object and at.name and hasattr(value, "__dict__"):
            # a digest of the attributes' names shows an attribute that only one of the two processes has
            self._note(at, digest(sorted(labels)))

    def _list_parts(self, at: At) -> list[InnerValue]:
        try:
            return list(list_inner_values(at.name, at.value))
        except Exception:  # an error in the user's own methods must not end a run
            return []

    def _is_restored(self, owner: Any, part: InnerValue) -> bool:
        """Return whether a loop's checkpoint contains an attribute because it is a hyperparameter of a kept object."""
        is_kept = isinstance(self._recipe, Kept) and isinstance(owner, MODULES) and self._registered.has(owner)
        return is_kept and part.value is not None and is_hyperparameter(part.label, part.value)

    # ---- the report

    def _find_place(self, at: At) -> tuple[str, bool]:
        """Return the first line of the user's code that changes a variable or an attribute, and whether there is one.

        If no line changes it, return the first line that reads it or, for an item of a container, that reads the
        container.
        """
        codes = [each for each in self._codes if each.co_name != "__init__"]
        own = set(list_codes(type(at.owner))) if at.owner is not None else set()
        codes.sort(key=lambda each: each not in own)
        for key in reversed(re.findall(r"[^\W\d]\w*", re.sub(r"\[.*?\]| #\d+", "", at.name))):
            for kind in ("STORE", "LOAD", "LOAD_FAST"):
                for code in codes:
                    line = _index_lines(code).get((kind, key))
                    if line and (kind == "LOAD_FAST" or key not in code.co_cellvars):
                        return f"{code.co_filename}:{line}: ", kind == "STORE" and key == last_part(at.name)
        return "", False


@functools.cache
def _index_lines(code: types.CodeType) -> dict[tuple[str, str], int]:
    """Return the first line in which a function stores or loads a name, by kind and name.

    The kind is ``STORE`` or ``LOAD`` for an attribute, a global or a closure's variable, and ``LOAD_FAST`` for a local
    variable.
    """
    found: dict[tuple[str, str], int] = {}
    for each in dis.get_instructions(code):
        kind, _, where = each.opname.partition("_")
        if each.positions and each.positions.lineno:
            if where in ("ATTR", "METHOD", "DEREF", "GLOBAL"):
                found.setdefault((kind, str(each.argval)), each.positions.lineno)
            elif kind == "LOAD" and where.startswith("FAST"):
                names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
                for name in names:
                    found.setdefault(("LOAD_FAST", str(name)), each.positions.lineno)
    return found


def _find_order(at: At) -> int:
    if at.is_log or is_logger(last_part(at.name), at.value):
        return LOGS
    if state.is_generator(at.value):
        return GENERATORS
    if has_state(at.value):
        return FIRST
    return NUMBERS if isinstance(at.value, NUMERIC) and not isinstance(at.value, bool) else OTHERS


def _has_no_data(module: nn.Module) -> bool:
    """Return whether all of a module's tensors are on the meta device, as for `torch.func.functional_call`."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(each.is_meta for each in tensors)


def _list_inner(value: Any) -> list[nn.Module]:
    return list(value.modules())[1:] if isinstance(value, nn.Module) else []


def _list_saved_names(value: Any) -> set[str]:
    """Return the names in an object's ``state_dict``, and the same names with a leading underscore."""
    try:
        names = {str(each) for each in value.state_dict()}
    except Exception:
        names = set()
    return names | {f"_{each}" for each in names}


def _digest_state(value: Any) -> str:
    """Return the SHA-256 of an object's state; empty if reading the state raises any error."""
    try:
        if state.is_generator(value):
            read = state.read_generator(value)
        else:
            read = value if isinstance(value, Tensor) else value.state_dict()
        return digest_payload(state.to_payload(read))
    except Exception:
        return ""
