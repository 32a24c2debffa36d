"""The recipes that may be imported: those that the machine's operator allows, and those that a reader of a run trusts.

The operator lists them in the worker's environment variable ``HOLDFAST_ALLOWED_RECIPES``, separated by commas: modules,
recipes, and files and folders with code, for example ``my_models, holdfast.recipes.language:language, /srv/code/``. A
module allows the recipes in it and in its submodules. A folder allows the code below it, except files in a store. If
the variable is unset, all recipes are allowed; if it is empty, no recipe is allowed. The list also governs the classes
that ``log.sinks`` and ``log.observers`` name. `holdfast.store.permission` governs the code that a store's URL names.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import RecipeError
from holdfast.provenance.imports import find_spec, list_prefixes
from holdfast.provenance.ownership import RECIPES as OWN_RECIPES
from holdfast.provenance.ownership import is_own_file
from holdfast.store.permission import list_allowed, spell_allowed, split_store

RECIPES = "HOLDFAST_ALLOWED_RECIPES"
TAKE_OWN = "give your own recipe: --recipe module:function"


def check_recipe(name: str) -> None:
    """Raise RecipeError unless the operator allows a recipe. The recipe is not imported."""
    allowed = list_allowed(RECIPES)
    if allowed is None:
        return
    files = _find_files(name)
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


@dataclass(frozen=True)
class Trust:
    """The rules by which a command decides whether to import the recipe that a run's records name.

    A command that trains steps again needs this import, but anyone who may write to the store can write these records.
    By default the command accepts the recipe if it comes with Holdfast, or if its code belongs to the person who starts
    the command: in the current folder or on the module search path, and not installed. If the operator allows only some
    recipes, the recipe has to be one of them. A file in a store is never accepted.

    Args:
        recipe: the recipe to import in place of the recorded recipe; empty to import the recorded recipe.
        records: whether to accept any recorded recipe, except a file in a store.
    """

    recipe: str = ""
    records: bool = False

    def choose_recipe(self, recorded: str, store: str) -> str:
        """Return the recipe to train with. Nothing is imported.

        Args:
            recorded: the recipe's name in the run's records.
            store: the path or URL of the run's store.

        Raises:
            RecipeError: the recorded recipe isn't accepted, or the current folder is in a store.
        """
        if self.recipe:
            return self.recipe
        said, root, files = f"the run's records name the recipe {recorded!r}", _find_root(store), _find_files(recorded)
        if inside := [file for file in files if lies_in_store(file, root)]:
            raise RecipeError(f"{said}, whose file lies in a store: {inside[0]}", hint=TAKE_OWN)
        if lies_in_store(Path.cwd(), root):
            raise RecipeError(
                "the current folder lies in a store, where others may put code",
                hint="start the command in your project's folder",
            )
        if self.records:
            return recorded
        if list_allowed(RECIPES) is not None:
            check_recipe(recorded)
        elif not all(_is_readers(file, recorded) for file in files):
            raise RecipeError(
                f"{said}, whose code is neither in the current folder nor in Holdfast",
                hint=f"{TAKE_OWN}; or accept the recorded one: --trust-records",
            )
        return recorded


# The trust of a reader who gave no option.
BY_DEFAULT = Trust()


def lies_in_store(path: Path, root: Path | None = None) -> bool:
    """Return whether a path, whose links are resolved, lies in a folder of runs.

    Args:
        root: the folder of a store, if it is known.
    """
    project = Path.cwd()
    folders = [path, *path.parents]
    if root in folders or any((folder / "run.json").is_file() for folder in folders):
        return True
    inner = [folder for folder in folders if project in folder.parents and folder.is_dir()]
    return any(next(folder.glob("*/run.json"), None) is not None for folder in inner)


def _find_root(store: str) -> Path | None:
    parts = split_store(store)
    return Path(*parts[1:]) if parts[:1] == ("",) else None


def _find_files(recipe: str) -> list[Path]:
    """Return the files that an import of a recipe's module would run, with links resolved.

    The files include those of the packages that contain the module. For a module that can't be found, return no file.
    """
    module = recipe.rpartition(":")[0]
    if module.endswith(".py"):
        return [Path(os.path.realpath(module))]
    with _searched_like_a_rank():
        specs = [spec for each in list_prefixes(module) if (spec := find_spec(each))]
    # A module without a file is built into Python, or is a namespace package, whose import runs no code.
    files = [spec.origin if spec.has_location else os.__file__ for spec in specs if spec.origin]
    return [Path(os.path.realpath(file)) for file in files if file]


@contextlib.contextmanager
def _searched_like_a_rank() -> Iterator[None]:
    """Inside the block, put the current folder first on the module search path, as ``python -m`` does for a rank."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.remove(str(Path.cwd()))


def _is_readers(file: Path, recipe: str) -> bool:
    if file.is_relative_to(OWN_RECIPES):
        return True
    is_named_by_path = recipe.rpartition(":")[0].endswith(".py")
    folders = [Path.cwd(), *(Path(entry).resolve() for entry in sys.path if entry)]
    return is_own_file(str(file)) and (not is_named_by_path or any(map(file.is_relative_to, folders)))
