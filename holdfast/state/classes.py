"""Values whose classes JSON lacks, such as an enum or ``torch.Size``, saved as a class name and a plain value.

A resume finds the class by its name, and creates the value from the plain value, such as a number or a list.
"""

import enum
import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.errors import StateError

# The kinds of NumPy's scalars that are saved with their type, each with the largest size in bytes: booleans, integers,
# floats, complex numbers, texts and bytes.
NUMBER_KINDS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16, "U": sys.maxsize, "S": sys.maxsize}
# The classes of plain values. A value of a derived class is restored by calling the derived class with the plain value.
PLAIN: tuple[type, ...] = (str, int, float, bytes, list, tuple, dict)
# The default factories that a restored defaultdict may have.
FACTORIES = {each.__name__: each for each in (int, float, bool, str, list, dict, deque)}


def is_named(kind: type) -> bool:
    """Return whether a class is a named tuple's class."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def is_enum(kind: type) -> bool:
    """Return whether a class is an enum."""
    return issubclass(kind, enum.Enum)


def is_of_plain(kind: type) -> bool:
    """Return whether a class derives from a class of plain values."""
    return issubclass(kind, PLAIN)


def name_number(value: np.generic) -> str | None:
    """Return the name of the type of a NumPy scalar; None if the scalar can't be saved."""
    dtype = value.dtype
    if dtype.itemsize > NUMBER_KINDS.get(dtype.kind, 0):
        return None
    return {"U": "str_", "S": "bytes_"}.get(dtype.kind, dtype.name)


def as_plain(value: Any, name: str) -> Any:
    """Return the plain value from which a resume can create ``value``, whose class derives from a plain class.

    For example, a ``torch.Size`` becomes a tuple.

    Raises:
        StateError: the class can't make an equal value from the plain value.
    """
    kind: Any = type(value)
    base = _base_of(value)
    plain = _strip(base, value)
    try:
        made = make_again(kind, plain)
        is_same = type(made) is kind and (base.__eq__(made, value) is True or value != value)
    except Exception:  # catch any error, because the class's own code may raise it
        is_same = False
    if not is_same or getattr(value, "__dict__", None):
        raise StateError(
            f"{name or 'the state'} is a {kind.__module__}.{kind.__qualname__}, which a resume can't rebuild from a "
            f"plain {base.__name__}",
            hint=f"save a plain {base.__name__} in its place",
        )
    return plain


def make_again(kind: Any, plain: Any) -> Any:
    """Call a class with the plain value that `as_plain` returned, and return the new object."""
    return kind(FACTORIES.get(plain[0] or ""), plain[1]) if issubclass(kind, defaultdict) else kind(plain)


def _base_of(value: Any) -> Any:
    return next(each for each in PLAIN if isinstance(value, each))


def _strip(base: Any, value: Any) -> Any:
    """Return a value of a derived class as a value of the base class.

    For a defaultdict, return a list of its default factory's name and its items. If the factory isn't in `FACTORIES`,
    return None in place of the list, because a resume couldn't find the factory.
    """
    if isinstance(value, defaultdict):
        make = value.default_factory
        if make is not None and FACTORIES.get(getattr(make, "__name__", "")) is not make:
            return None
        return [make.__name__ if make is not None else None, dict(value)]
    if base is str:
        return str.__str__(value)
    if base is bytes:
        return bytes.__getitem__(value, slice(None))
    return base(value) if base in (list, tuple, dict) else base.__pos__(value)


def path_of(kind: type, name: str) -> tuple[str, str]:
    """Return the module and the qualified name by which `find_class` finds a class.

    Raises:
        StateError: the class can't be found by a name, because it was defined inside a function.
    """
    path = kind.__module__, kind.__qualname__
    if _look_up(*path) is not kind:
        raise StateError(
            f"{name or 'the state'} is of the class {kind.__qualname__}, which a resume can't find by its name",
            hint="define the class at the top of a module, or save a plain tuple or value",
        )
    return path


def _look_up(module: str, name: str) -> Any:
    """Return an object of an already imported module by its qualified name; None if there is no such object."""
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), sys.modules.get(module))


def find_class(module: str, name: str, is_right: Callable[[type], bool]) -> Any:
    """Return a class by its module and name. The module must already be imported: a saved state mustn't import any.

    Args:
        is_right: returns whether a class is of the expected kind.

    Raises:
        StateError: there is no such class.
    """
    found = _look_up(module, name)
    if not isinstance(found, type) or not is_right(found):
        raise StateError(
            f"the checkpoint contains an object of the class {name} of the module {module}, which the recipe doesn't "
            "import now",
            hint="import the module in the recipe, and don't rename the class",
        )
    return found
