"""The originals: the objects that a kept container contains when the user's loop begins.

Only originals are restored in place. If an original is still in the container at a save, the loop has not replaced it,
and can only have changed it in place. The resumed process has built the original again. So a restore writes the saved
values into the original's memory, and other variables that refer to the original see these values. An object that the
loop has added may be a view of the data, or a constant that the loop adds again, so a restore makes a new object.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.errors import RecipeError
from holdfast.state.forms import Form, describe_form
from holdfast.state.generators import is_generator
from holdfast.state.tensor_forms import describe_shard, is_sharded

# The keys and indices that lead from the outermost container to an item.
Path = tuple[Any, ...]

# If `sys.getrefcount` returns less than this number for an object, only this module refers to the object: with its own
# reference, and with the argument of `sys.getrefcount`.
OWN_REFERENCES = 3


class Originals:
    """The objects inside a kept container at the moment when this object is built.

    They are tensors, arrays, generators, containers, and objects with a ``state_dict``. A restore writes into these
    objects in place.

    Containers are kept alive until the next call of `drop`. After `hold`, all originals are kept alive until then.

    Args:
        container: a dict, a list or a deque. A tensor or an array counts as a container whose only original is itself.
        name: the container's name in the message of an error.
        is_left_out: returns whether an item of a dict is left out of the state; it gets the dict and the item's key.

    Attributes:
        objects: the number of originals with a ``state_dict``.
    """

    def __init__(
        self, container: Any, name: str, is_left_out: Callable[[Any, Any], bool] = lambda container, key: False
    ) -> None:
        self._name, self._is_left_out = name, is_left_out
        self._references: list[Callable[[], Any]] = []
        self._learns: list[bool] = []  # for each original, whether it was a tensor with requires_grad
        self._devices: list[str] = []  # for each original, the type of its device
        self._paths: list[Path] = []
        self._numbers: dict[Path, int] = {}
        self._by_id: dict[int, int] = {}
        self._held: list[Any] = []
        self._forms: dict[int, Form] = {}  # the forms of the originals with a ``state_dict``, and of generators
        self._shards: dict[int, Any] = {}  # the sharding of the originals that are sharded tensors
        self.objects = 0
        for path, value in self._list_items(container, (), set()):
            self._numbers[path] = len(self._paths)
            self._by_id.setdefault(id(value), len(self._paths))
            self._paths.append(path)
            self._references.append(_refer_to(value))
            self._learns.append(isinstance(value, Tensor) and value.requires_grad)
            self._devices.append(value.device.type if isinstance(value, Tensor) else "cpu")
            self.objects += has_methods(value)
            if is_sharded(value):
                self._shards[len(self._paths) - 1] = describe_shard(value)
            if has_methods(value) or is_generator(value):
                self._forms[len(self._paths) - 1] = describe_form(value)

    def _list_items(self, value: Any, path: Path, within: set[int]) -> Iterator[tuple[Path, Any]]:
        if id(value) in within:
            raise RecipeError(
                f"run.keep({self._name}=...): the container {name_path(self._name, path)} contains itself",
                hint="keep the parts of the container that a step changes",
            )
        if is_tracked(value):
            yield path, value
        inner = {*within, id(value)}
        for key, each in list_inside(value):
            if not (isinstance(value, dict) and self._is_left_out(value, key)):
                yield from self._list_items(each, (*path, key), inner)

    def find(self, value: Any) -> int | None:
        """Return the number of a value among the originals; None if the value isn't an original."""
        number = self._by_id.get(id(value))
        return number if number is not None and self._references[number]() is value else None

    def has_replaced(self, path: Path, value: Any) -> bool:
        """Return whether an original at a path, or inside the container at that path, is another object now."""
        items = self._list_items(value, path, set())
        return any((number := self.number_at(at)) is None or self.get(number) is not each for at, each in items)

    def list_objects(self) -> Iterator[tuple[str, Any]]:
        """Yield each original with a ``state_dict`` that still exists, after its name: ``state['models'][0]``."""
        for path, refer in zip(self._paths, self._references, strict=True):
            if has_methods(value := refer()):
                yield name_path(self._name, path), value

    def number_at(self, path: Path | None) -> int | None:
        """Return the number of the original that was at a path; None if the path had no original."""
        return None if path is None else self._numbers.get(path)

    def get(self, number: int | None) -> Any:
        """Return the original object with this number; None if the object no longer exists."""
        return self._references[number]() if number is not None and number < len(self._references) else None

    def path_of(self, number: int) -> Path:
        """Return the path of an original in the container when the loop began."""
        return self._paths[number]

    def learned(self, number: int) -> bool:
        """Return whether an original is a tensor that required a gradient when the loop began."""
        return self._learns[number]

    def form_of(self, number: int | None) -> Form | None:
        """Return the form that an original had when the loop began; None unless it has a ``state_dict``."""
        return self._forms.get(number) if number is not None else None

    def shard_of(self, number: int | None) -> Any:
        """Return how an original was sharded when the loop began; None if it wasn't sharded."""
        return self._shards.get(number) if number is not None else None

    def device_of(self, number: int | None) -> str:
        """Return the type of an original tensor's device, "cpu" or "cuda"; "cpu" if the original isn't a tensor."""
        return self._devices[number] if number is not None else "cpu"

    def hold(self) -> None:
        """Keep all originals alive until the next call of `drop`.

        During a restore, one container may drop an object that a second container gets later.
        """
        self._held = [refer() for refer in self._references]

    def drop(self) -> None:
        """Release the containers to which only this `Originals` refers: no code can use them again."""
        self._held = []
        for reference in self._references:
            if isinstance(reference, _Strong) and sys.getrefcount(reference.value) < OWN_REFERENCES:
                reference.value = None


class _Strong:
    """A strong reference, for objects that don't allow weak references, such as dicts."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _refer_to(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return _Strong(value)


def is_container(value: Any) -> bool:
    """Return whether a value is a container whose items are restored one by one."""
    return isinstance(value, dict | list | deque) and not has_methods(value)


def is_tracked(value: Any) -> bool:
    """Return whether a value may be restored in place."""
    return isinstance(value, Tensor | np.ndarray) or is_stateful(value)


def is_stateful(value: Any) -> bool:
    """Return whether an item of a container is a container, a random generator, or an object with a ``state_dict``."""
    return has_methods(value) or is_generator(value) or isinstance(value, dict | list | deque)


def has_methods(value: Any) -> bool:
    """Return whether a value has methods that read and restore its own state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_tuple(value: Any) -> bool:
    """Return whether a value is a tuple, plain or named, whose items are restored one by one."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def list_inside(value: Any) -> list[tuple[Any, Any]]:
    """Return pairs of a key or an index and the item of a container or a tuple; an empty list for any other value."""
    if is_container(value) and isinstance(value, dict):
        return [*value.items()]
    return [*enumerate(value)] if is_container(value) or is_tuple(value) else []


def name_path(name: str, path: Path) -> str:
    """Return an item's name as in Python code: ``state['seen'][3]``."""
    return name + "".join(f"[{key!r}]" for key in path)
