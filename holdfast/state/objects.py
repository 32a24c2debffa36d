"""The state of a dict of attributes that contain further objects, such as an environment inside its wrappers."""

import enum
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.errors import RecipeError
from holdfast.state.attributes import Attributes, is_plain
from holdfast.state.clocks import find_holder_of, list_measured
from holdfast.state.generators import is_unseeded
from holdfast.state.originals import has_methods
from holdfast.state.recorders import is_recorder
from holdfast.state.written_times import find_written_times

# Classes whose objects aren't searched for attributes, because code and types have no state, and the other values never
# change.
LEFT_ALONE = (
    type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, np.dtype, torch.dtype,
    torch.device, enum.Enum, str, bytes, int, float, complex, frozenset, range, slice, property, re.Pattern,
    weakref.ref,
)  # fmt: skip
MOST_OBJECTS = 2_000
# The modules of objects that stand for another process.
OF_PROCESSES = {"multiprocessing", "_multiprocessing", "multiprocess", "subprocess"}


class _Owner:
    """A stand-in for the owner of a dict of attributes, so that the search for objects can begin with an object."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__ = attributes


class Objects:
    """The state of all objects in a dict of attributes, such as an environment and the wrappers around it.

    An object's state is its plain attributes that have changed since `run.keep`. An object may be replaced by another
    object of the same class, as when an environment is reset. The state lacks those objects that have a ``state_dict``,
    such as an algorithm's policy: the caller saves them (see `list_parts`).
    """

    def __init__(self, name: str, attributes: dict[str, Any], leave_out: Collection[str] = ()) -> None:
        """Note the current attributes of each object in the dict, and of each object to which their attributes refer.

        Args:
            leave_out: the names of attributes, of any of these objects, that are neither saved nor restored.

        Raises:
            RecipeError: the state of an object, such as a simulator, can't be read as attributes.
        """
        self._name, self._root, self._leave_out = name, _Owner(attributes), frozenset(leave_out)
        self._look()
        self._built, self._unseeded = self._describe(), self._list_unseeded()
        durations = find_written_times([type(each) for _, each in self.list_objects()])
        self._parts = {
            path: Attributes(functools.partial(self._find, path), self._find_left_out(each), durations.has_item)
            for path, each in self._objects.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the changed attributes of each object, by the object's path.

        Raises:
            RecipeError: an object was added or removed since `run.keep`, or has a different class; or a new generator
                has no seed.
        """
        self._look()
        now = self._describe()
        if found := sorted(path for path in now.keys() | self._built.keys() if now.get(path) != self._built.get(path)):
            raise RecipeError(
                f"run.keep({self._name}=...): {found[0]} was a different object, or None, when run.keep was called: a "
                "resume couldn't restore the new object",
                hint="make all objects before the loop, and reset an environment with a seed; or keep an object whose "
                "state_dict and load_state_dict read and restore it",
            )
        if new := sorted(self._list_unseeded() - self._unseeded):
            raise RecipeError(
                f"run.keep({self._name}=...): a step has made {new[0]} with a seed from the operating system, so the "
                f"program computes different values in each run",
                hint=f"before run.keep: {new[0].rpartition('.')[0]}.reset(seed=0)",
            )
        return {path: state for path, part in self._parts.items() if (state := part.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._look()
        for path, part in self._parts.items():
            part.load_state_dict(state.get(path, {}))

    def list_objects(self) -> list[tuple[str, Any]]:
        """Return the owner of the attributes, and the objects inside, each after its path."""
        owner = find_holder_of(vars(self._root)) or self._root
        return [(path, owner if each is self._root else each) for path, each in self._objects.items()]

    def list_parts(self) -> list[tuple[str, Any]]:
        """Return the objects inside that have a ``state_dict``, each after its path."""
        return [*self._stateful.items()]

    def has_attribute(self, name: str) -> bool:
        """Return whether one of the objects has an attribute of this name."""
        return any(name in vars(each) for each in self._objects.values())

    def _find(self, path: str) -> Any:
        return self._objects[path]

    def _look(self) -> None:
        self._stateful: dict[str, Any] = {}
        self._objects = dict(_walk(self._name, self._root, self._leave_out, self._stateful))

    def _find_left_out(self, owner: Any) -> Callable[[str], bool]:
        """Return a function that tells whether an attribute is left out: a reading of a clock, or the user's choice."""
        measured = list_measured(vars(owner), None if isinstance(owner, _Owner) else owner)
        return (measured | self._leave_out).__contains__

    def _describe(self) -> dict[str, Any]:
        """Return, by path, the class of each object; for a member of an enum, the member itself.

        An object with a ``state_dict`` must stay the same object, so it is described by its id.
        """
        found: dict[str, Any] = {path: type(each) for path, each in self._objects.items()}
        found |= {path: id(each) for path, each in self._stateful.items()}
        for path, each in self._objects.items():
            for key, value in vars(each).items():
                if key in self._leave_out:
                    continue
                if isinstance(value, enum.Enum):
                    found[f"{path}.{key}"] = value
        return found

    def _list_unseeded(self) -> set[str]:
        objects = self._objects.items()
        return {f"{path}.{key}" for path, each in objects for key, value in vars(each).items() if is_unseeded(value)}


def has_objects(value: Mapping[Any, Any]) -> bool:
    """Return whether a dict of attributes contains objects that have attributes but no ``state_dict``."""
    if not all(isinstance(key, str) for key in value):
        return False
    return any(hasattr(each, "__dict__") and not has_methods(each) for each in _inside(value))


def can_keep(attributes: Mapping[Any, Any]) -> bool:
    """Return whether ``run.keep`` accepts an object's attributes.

    Args:
        attributes: the attributes, as ``vars(object)``.
    """
    if not has_objects(attributes):
        return all(is_plain(each) or has_methods(each) for each in attributes.values())
    try:
        return bool([*_walk("", _Owner(dict(attributes)), frozenset(), {})])
    except RecipeError:
        return False


def is_left_alone(value: Any) -> bool:
    """Return whether an object isn't searched for attributes: it never changes, or it only records a training."""
    is_of_code = inspect.isroutine(value) or type(value).__module__ in ("_abc", "types", "typing")
    return isinstance(value, LEFT_ALONE) or is_of_code or is_recorder(value)


def _inside(value: Any, within: Collection[int] = ()) -> Iterator[Any]:
    """Yield the objects in a container, and in the containers inside it. Skip plain values and `LEFT_ALONE`.

    Args:
        within: the ids of the containers that contain this container. They are skipped, because a container that
            contains itself would be entered again and again.
    """
    for each in value.values() if isinstance(value, Mapping) else value:
        if is_plain(each) or is_left_alone(each) or id(each) in within:
            continue
        if isinstance(each, dict | list | tuple):
            yield from _inside(each, {*within, id(value)})
        else:
            yield each


def _walk(name: str, root: Any, leave_out: Collection[str], stateful: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a path and an object: the given object, and all objects inside it.

    Args:
        stateful: gets the objects with a ``state_dict``, by path. They aren't entered.
    """
    waiting, seen = [(name, root)], {id(root)}
    while waiting and len(seen) < MOST_OBJECTS:
        path, owner = waiting.pop(0)
        yield path, owner
        for key, value in [(key, each) for key, each in vars(owner).items() if key not in leave_out]:
            for number, each in enumerate(_inside({key: value})):
                inner = f"{path}.{key}" if each is value else f"{path}.{key}[{number}]"
                if type(each).__module__.partition(".")[0] in OF_PROCESSES:
                    raise _refuse_process(name, inner, each)
                if not has_methods(each) and not hasattr(each, "__dict__"):
                    raise _refuse(name, inner, each)
                if id(each) in seen:
                    continue
                seen.add(id(each))
                if has_methods(each):
                    stateful[inner] = each
                else:
                    waiting.append((inner, each))


def _refuse(name: str, path: str, part: Any) -> RecipeError:
    own = path.rpartition(".")[2].partition("[")[0]
    if isinstance(part, set):
        hint = f"use a dict in place of the set: {path} = dict.fromkeys({path})"
    else:
        hint = (
            f'if no later step needs it: run.keep({name}={name}, leave_out=("{own}",)); otherwise keep an object whose '
            "state_dict and load_state_dict read and restore it"
        )
    return RecipeError(f"run.keep({name}=...): the state of {path}, a {_spell(part)}, can't be read", hint=hint)


def _refuse_process(name: str, path: str, part: Any) -> RecipeError:
    return RecipeError(
        f"run.keep({name}=...): {path} is a {_spell(part)}, whose state is partly in other processes, so it can't be "
        "read",
        hint='make the environment in this process: gymnasium.make_vec(..., vectorization_mode="sync"), or the class '
        "SyncVectorEnv "
        "or DummyVecEnv",
    )


def _spell(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
