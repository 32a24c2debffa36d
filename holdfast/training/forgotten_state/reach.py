"""The values that are directly reachable from a value. Only this module of the search looks into objects.

- From a function: its closure, defaults and attributes, and the globals that it and its inner functions load.
- From a bound method or a ``partial``: the function, and the bound object or arguments.
- From an object: its attributes, slots and lazy buffers, the plain values of its classes, and the user's classes.
- From a class of the user's: its attributes and functions.
- From a container: its items. From a generator: its variables. From a built-in iterator: the iterable that it reads.

The caller decides how far to go. The search (`search`) starts from the roots of a program, and continues from each
value that it reaches. The list of the objects in a checkpoint (`registered`) follows attributes and items to objects
with a state.
"""

import dis
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast.provenance.ownership import ENGINE, is_own, is_own_file
from holdfast.state.slots import read_attributes
from holdfast.training.closures import list_closure, walk_code
from holdfast.training.forgotten_state.digests import (
    CACHES,
    CONTAINERS,
    MAX_ITEMS,
    SCALARS,
    is_iterator,
    reduce_iterator,
)

# The classes of a class's members that contain the functions of a method or a property, and the names of these
# functions in them.
DESCRIPTORS = (
    property, staticmethod, classmethod, functools.cached_property, functools.partialmethod,
    functools.singledispatchmethod,
)  # fmt: skip
INSIDE_DESCRIPTORS = ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")
NAMESPACES = ("SimpleNamespace", "Namespace", "Queue", "LifoQueue", "PriorityQueue", "partial")
# torch's modules whose objects share a model over ranks. They hold buffers of a step, whose memory is freed after it.
OF_SHARDING = ("torch.distributed.fsdp", "torch.distributed._", "torch.distributed.tensor", "torch.distributed.device")
# Attributes of torch's own classes. They are skipped, except the dicts of hooks, because a hook may be the user's.
OF_TORCH = {
    *vars(nn.Module()),
    *vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)),
    *("_opt_called", "_is_full_backward_hook", "step", "_compiled_call_impl", "_wrapped_by_lr_sched"),
}


@dataclass
class InnerValue:
    """A value that is directly reachable from another value.

    Attributes:
        label: the last part of the value's name, such as ``best``.
        name: the value's whole name, which begins with a variable, such as ``self.best``.
        is_noted: whether a report may name this value: True for a variable or an attribute, False for a container's
            item.
    """

    label: str
    name: str
    value: Any = field(repr=False)
    is_noted: bool = True


def list_inner_values(name: str, value: Any) -> Iterator[InnerValue]:
    """Yield the values that are directly reachable from a value."""
    if isinstance(value, types.FunctionType):
        yield from _list_variables(value)
    elif isinstance(value, types.MethodType):
        owner = name.rpartition(".")[0] or "self"
        yield InnerValue(owner, owner, value.__self__, is_noted=False)
        yield InnerValue(name, name, value.__func__, is_noted=False)
    elif isinstance(value, functools.partial):
        yield InnerValue(name, name, value.func, is_noted=False)
        is_users = is_own(value.func)
        yield from (
            InnerValue("args", f"{name}.args[{index}]", each, is_users) for index, each in enumerate(value.args)
        )
        yield from (InnerValue(key, key, each, is_users) for key, each in value.keywords.items())
    elif isinstance(value, CONTAINERS):
        yield from _list_items(name, value)
    elif isinstance(value, types.GeneratorType):
        inside = {**(value.gi_frame.f_locals if value.gi_frame else {}), "": value.gi_yieldfrom}
        yield from (InnerValue(key, f"{name}.{key}".rstrip("."), each, is_noted=False) for key, each in inside.items())
    elif is_iterator(value):
        yield from (InnerValue("", name, each, is_noted=False) for each in reduce_iterator(value))
    elif isinstance(value, type):
        yield from _list_attributes(name, vars(value)) if is_own(value) else ()
    elif not isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.CodeType, *SCALARS)):
        yield from list_attributes(name, value)


def list_attributes(name: str, value: Any) -> Iterator[InnerValue]:
    """Yield the attributes of an object and of its class."""
    classes = [kind for kind in reversed(type(value).__mro__) if is_own(kind)]
    defaults = {key: each for kind in classes for key, each in vars(kind).items() if isinstance(each, SCALARS)}
    attributes: dict[str, Any] = defaults | read_attributes(value)
    if isinstance(value, nn.Module):
        attributes |= {key: value._buffers.get(key) for key in value._non_persistent_buffers_set}
    is_torchs = isinstance(value, nn.Module | torch.optim.Optimizer)
    for part in _list_attributes(name, attributes):
        if not is_torchs or part.label not in OF_TORCH:
            yield part
        elif part.label.endswith("_hooks"):
            yield InnerValue(part.label, part.name, part.value, is_noted=False)
    yield from (InnerValue("", kind.__name__, kind, is_noted=False) for kind in reversed(classes))


def _list_attributes(name: str, values: Mapping[str, Any]) -> Iterator[InnerValue]:
    for key, value in list(values.items()):
        path = f"{name}.{key}" if name else key
        if isinstance(value, DESCRIPTORS):
            yield from (InnerValue(key, path, each) for each in list_functions(value))
        elif not key.startswith("__") or isinstance(value, types.FunctionType):
            yield InnerValue(key, path, value)


def _list_items(name: str, value: Any) -> Iterator[InnerValue]:
    """Yield the items of a container. An item is named by its position if its key differs between processes."""
    keyed = value.items() if isinstance(value, dict) else enumerate(value)
    is_of_hooks = name.endswith("_hooks")  # the keys of hooks are numbers that differ between processes
    for number, (key, each) in enumerate(keyed):
        if number >= MAX_ITEMS:
            break
        label = repr(key) if isinstance(key, str | int | float) and not is_of_hooks else str(number)
        yield InnerValue("", f"{name}[{label}]", each, is_noted=False)


def _list_variables(function: types.FunctionType) -> Iterator[InnerValue]:
    """Yield the variables that a function's code can name, except locals and, for a library's function, globals."""
    is_users = is_own(function)
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = [*zip(reversed(parameters), reversed(function.__defaults__ or ()), strict=False)]
    variables = (*list_closure(function), *defaults, *(function.__kwdefaults__ or {}).items())
    yield from (InnerValue(name, name, value, is_users) for name, value in variables)
    for name, value in vars(function).items():
        yield InnerValue(name, name if name == "__wrapped__" else f"{function.__name__}.{name}", value, is_users)
    for code in walk_code(function.__code__) if is_users else ():
        yield from _list_globals(code, function.__globals__)


def _list_globals(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[InnerValue]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for name in sorted(names & variables.keys()):
        value = variables[name]
        if not isinstance(value, types.ModuleType):
            yield InnerValue(name, name, value)
        elif is_own_file(getattr(value, "__file__", None) or ""):
            yield from (
                InnerValue(key, f"{name}.{key}", vars(value)[key]) for key in code.co_names if key in vars(value)
            )


def list_codes(value: Any) -> list[types.CodeType]:
    """Return the code of the user's function, or of the methods of the user's class, inside decorators, too."""
    members = vars(value).values() if isinstance(value, type) else [value]
    codes = [each.__code__ for member in members for each in list_functions(member)]
    return [each for each in codes if is_own_file(each.co_filename)]


def list_functions(member: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a function or of a class's member: a property, a static, class or decorated method.

    A decorator such as ``@torch.no_grad()`` returns a new function, which has the decorated function as
    ``__wrapped__``, or only as a variable of its closure.
    """
    waiting, seen = [member], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, types.FunctionType):
            yield each
            waiting += [value for _, value in list_closure(each) if isinstance(value, types.FunctionType)]
            waiting += filter(None, [getattr(each, "__wrapped__", None)])
        elif isinstance(each, (*DESCRIPTORS, CACHES)):
            waiting += filter(None, (getattr(each, name, None) for name in INSIDE_DESCRIPTORS))


def is_entered(value: Any) -> bool:
    """Return whether the search looks inside a value.

    It doesn't look inside Python's own objects, such as a logger, and the objects of `OF_SHARDING`.
    """
    if isinstance(value, (*SCALARS, torch.Tensor, types.ModuleType, types.BuiltinFunctionType, types.CodeType)):
        return False
    kind = type(value)
    # FSDP2 changes the class of a user's module to a new class.
    if kind.__module__.startswith(OF_SHARDING) and not isinstance(value, nn.Module):
        return False
    top = kind.__module__.partition(".")[0]
    is_pythons = top in sys.stdlib_module_names
    return not is_pythons or is_transparent(value)


def is_holdfasts(value: Any) -> bool:
    """Return whether a value is an object of Holdfast, or a generator of Holdfast's code, such as ``run.batches()``."""
    if isinstance(value, types.GeneratorType):
        return value.gi_code.co_filename.startswith(ENGINE) and not is_own_file(value.gi_code.co_filename)
    return type(value).__module__.partition(".")[0] == "holdfast" and not is_own(type(value))


def is_transparent(value: Any) -> bool:
    """Return whether a value only serves to reach other values: a container, function, class, iterator or namespace."""
    kinds = (types.FunctionType, types.MethodType, types.GeneratorType, type, *CONTAINERS, CACHES)
    return isinstance(value, kinds) or is_iterator(value) or type(value).__name__ in NAMESPACES
