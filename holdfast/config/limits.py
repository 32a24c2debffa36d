"""Limits of settings: numbers have to fit clocks and JSON, and texts have to fit a path and a process's environment."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

# Bounds that no run reaches. With them, every number fits a clock, a timeout, a float and a JSON reader.
Seconds = Annotated[float, Field(le=1e9)]
Count = Annotated[int, Field(le=2**53)]
Processes = Annotated[int, Field(le=1024)]

MAX_FILE_BYTES = 2**20  # the maximum size of a configuration file
MAX_JSON_BYTES = 100_000  # the maximum size of a whole configuration as JSON
MAX_TEXT_CHARS = 4096  # the maximum length of one text or path
MAX_DEPTH = 64  # the deepest nesting of tables and lists


def check_plain(value: object, is_own: bool, depth: int = 0) -> None:
    """Raise ValueError for text that UTF-8 can't encode, and for tables that are nested too deeply.

    Args:
        is_own: whether the field is Holdfast's and not the recipe's. If so, also refuse long text and null characters,
            because the text is a name or a path.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"tables and lists are nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("expected text in UTF-8")
        if is_own and "\0" in value:
            raise ValueError("expected text without a null character")
        if is_own and len(value) > MAX_TEXT_CHARS:
            raise ValueError(f"expected at most {MAX_TEXT_CHARS} characters")
    for item in _items(value):
        check_plain(item, is_own, depth + 1)


def find_infinite(value: object, name: str) -> str:
    """Return the dotted name of the first NaN or infinity in a value called ``name``; empty if there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return name
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return next(filter(None, (find_infinite(item, f"{name}.{key}") for key, item in pairs)), "")


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list | tuple) else ()
