"""The recipes that may be imported, because the machine's operator allows them.

The operator lists them in the worker's environment variable ``HOLDFAST_ALLOWED_RECIPES``, separated by commas: modules,
recipes, and files and folders with code, for example ``my_models, holdfast.recipes.language:language, /srv/code/``. A
module allows the recipes in it and in its submodules. A folder allows the code below it, except files in a store. If
the variable is unset, all recipes are allowed; if it is empty, no recipe is allowed. The list also governs the classes
that ``log.sinks`` and ``log.observers`` name. `holdfast.store.permission` governs the code that a store's URL names,
and `holdfast.recipe.trust` what a run's records name.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.errors import RecipeError
from holdfast.provenance.imports import find_spec, list_prefixes
from holdfast.store.modules import lies_in_store, place_current
from holdfast.store.permission import list_allowed, spell_allowed

RECIPES = "HOLDFAST_ALLOWED_RECIPES"


def check_recipe(name: str) -> None:
    """Raise RecipeError unless the operator allows a recipe. The recipe is not imported."""
    allowed = list_allowed(RECIPES)
    if allowed is None:
        return
    files = find_files(name)
    if any(_allows(entry, name, files) for entry in allowed):
        return
    raise RecipeError(
        f"recipe {name!r} is not allowed on this machine",
        hint=f"{RECIPES} allows {spell_allowed(allowed)}; the machine's operator can add the recipe to that variable",
    )


def _allows(entry: str, recipe: str, files: Sequence[Path]) -> bool:
    if "/" not in entry and not entry.endswith(".py"):
        return recipe == entry or recipe.startswith((f"{entry}.", f"{entry}:"))
    before, _, function = entry.partition(".py:")
    path = os.path.realpath(f"{before}.py" if function else before)
    is_there = bool(files) and files[-1].is_relative_to(path) and not any(map(lies_in_store, files))
    return is_there and function in ("", recipe.rpartition(":")[2])


def find_files(recipe: str) -> list[Path]:
    """Return the files that an import of a recipe's module would run, with links resolved.

    The files include those of the packages that contain the module. For a module that can't be found, return no file.
    """
    return [Path(os.path.realpath(file)) for file in list_origins(recipe)]


def list_origins(recipe: str) -> list[str]:
    """Return the files of `find_files` as the search for modules names them, with links that aren't resolved."""
    module = recipe.rpartition(":")[0]
    if module.endswith(".py"):
        return [str(Path(module).absolute())]
    with searched_like_a_rank():
        specs = [spec for each in list_prefixes(module) if (spec := find_spec(each))]
    # A module without a file is built into Python, or is a namespace package, whose import runs no code.
    files = [spec.origin if spec.has_location else os.__file__ for spec in specs if spec.origin]
    return [file for file in files if file]


@contextlib.contextmanager
def searched_like_a_rank() -> Iterator[None]:
    """Inside the block, search for modules where a rank does; see `place_current`."""
    before = [*sys.path]
    sys.path[:] = place_current(before)
    try:
        yield
    finally:
        sys.path[:] = before
