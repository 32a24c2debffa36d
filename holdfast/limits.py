"""Limits of settings: what a clock, a path, JSON and a process's environment can hold."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

# Bounds that no run comes near, so that every number fits a clock, a timeout, a float and a JSON reader.
Seconds = Annotated[float, Field(le=1e9)]
Count = Annotated[int, Field(le=2**53)]
Processes = Annotated[int, Field(le=1024)]

# Of a configuration's file, of all of it as JSON, and of one text or path.
MAX_FILE_BYTES = 2**20
MAX_JSON_BYTES = 100_000
MAX_TEXT_CHARS = 4096
MAX_DEPTH = 64


def check_plain(value: object, is_own: bool, depth: int = 0) -> None:
    """Raise ValueError for text that isn't Unicode, and for tables that are nested without end.

    Args:
        is_own: whether the field is Holdfast's own, where text is a name or a path and so has no null character.
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
    """Return the dotted name of a number that JSON has no form for, in a value of this name; empty for none."""
    if isinstance(value, float) and not math.isfinite(value):
        return name
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return next(filter(None, (find_infinite(item, f"{name}.{key}") for key, item in pairs)), "")


def is_http_address(url: str) -> bool:
    """Return whether a URL names a host that can be asked over HTTP."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_good and url.isascii() and url.isprintable() and " " not in url


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list | tuple) else ()
