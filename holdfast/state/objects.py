"""The state of a dict of attributes that contain further objects, such as an environment inside its wrappers."""

import enum
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.errors import RecipeError
from holdfast.state.attributes import Attributes, is_plain
from holdfast.state.generators import is_generator
from holdfast.state.originals import has_methods

# Classes whose objects aren't searched for attributes, because code and types have no state, and numbers and texts are
# single values.
LEFT_ALONE = (
    type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, np.dtype, torch.dtype,
    torch.device, enum.Enum, str, bytes, int, float, complex,
)  # fmt: skip
MOST_OBJECTS = 2_000


class _Owner:
    """An object whose ``__dict__`` is a given dict."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__ = attributes


class Objects:
    """The state of all objects in a dict of attributes, such as an environment and the wrappers around it.

    An object's state is its plain attributes that have changed since `run.keep`. An object may be replaced by another
    object of the same class, as when an environment is reset.
    """

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        """Note the current attributes of each object in the dict, and of each object to which their attributes refer.

        Raises:
            RecipeError: the state of an object, such as a simulator, can't be read as attributes.
        """
        self._name, self._root = name, _Owner(attributes)
        self._look()
        self._built = self._describe()
        self._parts = {path: Attributes(functools.partial(self._find, path), _is_never) for path in self._objects}

    def state_dict(self) -> dict[str, Any]:
        """Return the changed attributes of each object, by the object's path.

        Raises:
            RecipeError: an object was added or removed since `run.keep`, or has another class.
        """
        self._look()
        now = self._describe()
        if found := sorted(path for path in now.keys() | self._built.keys() if now.get(path) != self._built.get(path)):
            raise RecipeError(
                f"run.keep({self._name}=...): {found[0]} was another object, or None, when run.keep was called: a "
                "resume couldn't restore the new object",
                hint="make all objects before the loop, and reset an environment with a seed; or keep an object whose "
                "state_dict and load_state_dict read and restore it",
            )
        return {path: state for path, part in self._parts.items() if (state := part.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._look()
        for path, part in self._parts.items():
            part.load_state_dict(state.get(path, {}))

    def _find(self, path: str) -> Any:
        return self._objects[path]

    def _look(self) -> None:
        self._objects = dict(_walk(self._name, self._root))

    def _describe(self) -> dict[str, Any]:
        """Return, by path, the class of each object and generator; for a member of an enum, the member itself."""
        found: dict[str, Any] = {path: type(each) for path, each in self._objects.items()}
        for path, each in self._objects.items():
            for key, value in vars(each).items():
                if is_generator(value) or isinstance(value, enum.Enum):
                    found[f"{path}.{key}"] = value if isinstance(value, enum.Enum) else type(value)
        return found


def has_objects(value: Mapping[Any, Any]) -> bool:
    """Return whether a dict of attributes contains objects that have attributes but no ``state_dict``."""
    if not all(isinstance(key, str) for key in value):
        return False
    return any(hasattr(each, "__dict__") and not has_methods(each) for each in _inside(value))


def _inside(value: Any, within: Collection[int] = ()) -> Iterator[Any]:
    """Yield the objects in a container, and in the containers inside it. Skip plain values and `LEFT_ALONE`.

    Args:
        within: the ids of the containers that contain this container. They are skipped, because a container that
            contains itself would be entered again and again.
    """
    for each in value.values() if isinstance(value, Mapping) else value:
        if is_plain(each) or isinstance(each, LEFT_ALONE) or id(each) in within:
            continue
        if isinstance(each, dict | list | tuple):
            yield from _inside(each, {*within, id(value)})
        else:
            yield each


def _walk(name: str, root: Any) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a path and an object: the given object, and all objects inside it."""
    waiting, seen = [(name, root)], {id(root)}
    while waiting and len(seen) < MOST_OBJECTS:
        path, owner = waiting.pop(0)
        yield path, owner
        for key, value in vars(owner).items():
            for number, each in enumerate(_inside({key: value})):
                inner = f"{path}.{key}" if each is value else f"{path}.{key}[{number}]"
                if has_methods(each) or not hasattr(each, "__dict__"):
                    raise RecipeError(
                        f"run.keep({name}=...): {inner} is a {type(each).__module__}.{type(each).__qualname__}, whose "
                        "state can't be read as attributes",
                        hint="keep an object whose state_dict and load_state_dict read and restore it",
                    )
                if id(each) not in seen:
                    seen.add(id(each))
                    waiting.append((inner, each))


def _is_never(name: str) -> bool:
    return False
