"""The recipes and stores that an operator allows runs to use, from two environment variables of the worker.

``HOLDFAST_ALLOWED_RECIPES``: module paths or recipes, for example ``my_models, holdfast.recipes.language:language``.
``HOLDFAST_ALLOWED_STORES``: folders or URLs, for example ``/data/runs, s3://team/runs``.

Entries are prefixes, separated by commas. A recipe's prefix ends at a dot, a colon or the end of the name, and a file's
at a ``/``, too; a store's at a ``/`` or the end. An unset variable restricts nothing; an empty one allows nothing.
"""

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import ConfigError, RecipeError

RECIPES = "HOLDFAST_ALLOWED_RECIPES"
STORES = "HOLDFAST_ALLOWED_STORES"
SCRATCH = "holdfast-"
SAME_SCHEME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "file": "", "local": ""}


def check_recipe(name: str) -> None:
    """Raise RecipeError unless the operator allows a recipe. The recipe is not imported."""
    allowed = _entries(RECIPES)
    if allowed is None:
        return
    module, _, attribute = name.rpartition(":")
    ends: tuple[str, ...] = (".", ":")
    if module.endswith(".py"):  # a file: without .. and links, as a store's folder
        name, ends = f"{os.path.realpath(module)}:{attribute}", (":", "/")
        allowed = [os.path.realpath(entry) if "/" in entry or entry.endswith(".py") else entry for entry in allowed]
    if any(name == entry or name.startswith(tuple(entry + end for end in ends)) for entry in allowed):
        return
    raise RecipeError(f"recipe {name!r} is not allowed on this machine", hint=_hint(RECIPES, allowed))


def check_store(url: str) -> None:
    """Raise ConfigError unless the operator allows a store. The store is not opened.

    Links and ``..`` in a folder's path are resolved first. A URL with ``.`` or ``..`` between slashes is not allowed.
    """
    allowed = _entries(STORES)
    if allowed is None:
        return
    parts = split_store(url)
    prefixes = [split_store(entry) for entry in allowed]
    if parts and any(prefix and parts[: len(prefix)] == prefix for prefix in prefixes):
        return
    if not _is_scratch(parts):
        raise ConfigError(f"store = {url!r} is not allowed on this machine", hint=_hint(STORES, allowed))


def split_store(url: str) -> tuple[str, ...]:
    """Return a store's scheme and the parts of its path in one normal form; empty if the URL has no normal form."""
    scheme, separator, path = url.partition("://")
    scheme = SAME_SCHEME.get(scheme, scheme)
    if not separator or scheme == "":
        try:
            return "", *Path(os.path.realpath(Path(path if separator else url).expanduser())).parts
        except (ValueError, RuntimeError):  # a null character, or the home of an unknown user
            return ()
    parts = tuple(part for part in path.split("/") if part)
    return () if {".", ".."} & set(parts) else (scheme, *parts)


def _is_scratch(parts: Sequence[str]) -> bool:
    """Return whether a store is in a temporary folder that a process of this user made for a proof or a replay."""
    temporary = split_store(tempfile.gettempdir())
    if parts[: len(temporary)] != temporary or not "".join(parts[len(temporary) :][:1]).startswith(SCRATCH):
        return False
    try:
        found = os.lstat(Path(*parts[1 : len(temporary) + 1]))
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _entries(variable: str) -> list[str] | None:
    text = os.environ.get(variable)
    return None if text is None else [entry.strip() for entry in text.split(",") if entry.strip()]


def _hint(variable: str, allowed: Sequence[str]) -> str:
    return f"{variable} allows {', '.join(allowed) or 'nothing'}"
