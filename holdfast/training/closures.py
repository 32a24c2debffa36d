"""The variables and the code inside a function."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any


def list_closure(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each closure variable of a function, except variables that aren't assigned yet."""
    cells = getattr(function, "__closure__", None) or ()  # a function compiled to C has no closure
    for name, cell in zip(function.__code__.co_freevars, cells, strict=False):
        with contextlib.suppress(ValueError):  # the variable isn't assigned yet
            yield name, cell.cell_contents


def walk_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and the code of the functions and classes that are defined in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from walk_code(inner)
