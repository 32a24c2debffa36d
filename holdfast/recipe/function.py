"""The function of a run: find it by ``module:attribute``, and build a `Recipe` with it.

Holdfast calls a function only if it is annotated to return a `Recipe` or to take a `Run`. So a configuration can't call
other code, such as ``os:system``.
"""

import glob
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config import did_you_mean
from holdfast.config.earlier import RECIPES
from holdfast.errors import IN_LOG, HoldfastError, RecipeError
from holdfast.provenance.imports import claim_recipe
from holdfast.provenance.location import describe_error, find_hint
from holdfast.recipe import Recipe
from holdfast.recipe.annotations import Function, find_inner, is_last_part, resolve, takes_run
from holdfast.recipe.permission import check_recipe
from holdfast.recipe.settings import list_defaults, make_arguments, resolve_settings
from holdfast.store.modules import is_store, search_current_folder


def find_program(name: str) -> Function:
    """Import the module of ``module:attribute`` and return the function.

    Raises:
        RecipeError: the operator doesn't allow the recipe, the module can't be imported or lacks the attribute, or the
            function isn't annotated to return a `Recipe` or to take a `Run`. If the module's own code raised, the
            message names the line. A recipe that isn't allowed is not imported.
    """
    check_recipe(name)
    module_name, attribute = split_recipe(name)
    search_current_folder(module_name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise make_build_error(name, error) from error
        hint = "start the command in the folder that contains the module, or add this folder to PYTHONPATH"
        if name in RECIPES:
            hint = (
                f"it is now {RECIPES[name]}, in Holdfast's repository; it continues older runs if you accept the drift"
            )
        raise RecipeError(f"recipe {name!r}: there is no module {error.name}", hint=hint) from None
    except Exception as error:
        raise make_build_error(name, error) from error
    try:
        builder = getattr(module, attribute)
    except AttributeError:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RecipeError(
            f"recipe {name!r}: {module_name} has no {attribute}", hint=did_you_mean(attribute, functions)
        ) from None
    if not callable(builder):
        raise RecipeError(f"recipe {name!r}: expected a function, found a {type(builder).__name__}")
    if not returns_recipe(builder) and not takes_run(builder):
        raise RecipeError(
            f"recipe {name!r} is refused: its annotations name neither a Recipe as result nor a Run as argument",
            hint=f"annotate the function: def {attribute}(...) -> Recipe, or def {attribute}(run: holdfast.Run)",
        )
    return builder  # type: ignore[no-any-return]


def split_recipe(name: str) -> tuple[str, str]:
    """Return the names of a recipe's module and function.

    Two effects: the module's package counts as the user's own code even if it is installed
    (see `holdfast.provenance.ownership`). And the folder of a recipe's file is put at the front of ``sys.path``, or at
    the end if the folder holds runs.

    Raises:
        RecipeError: there is no such file, or a module of this name is already loaded from another file.
    """
    module, _, attribute = name.rpartition(":")
    claim_recipe(name)
    if not module.endswith(".py"):
        return module, attribute
    path = Path(module).resolve()
    if not path.is_file():
        raise RecipeError(f"recipe {name!r}: there is no file {module}", hint=_find_nearby(Path(module), attribute))
    if str(path.parent) not in sys.path:
        sys.path.insert(len(sys.path) if is_store(path.parent) else 0, str(path.parent))
    loaded = getattr(sys.modules.get(path.stem), "__file__", None)
    if path.stem in sys.modules and (loaded is None or Path(loaded).resolve() != path):
        raise RecipeError(
            f"recipe {name!r}: Python has already loaded a different module {path.stem}, from "
            f"{loaded or 'Python itself'}",
            hint="give the file a different name",
        )
    return path.stem, attribute


def _find_nearby(module: Path, attribute: str) -> str:
    """Return the hint for a recipe's file that doesn't exist; it names a file of this name in or above the folder."""
    here = Path.cwd()
    places = [
        *itertools.chain.from_iterable(here.glob(f"{depth}{glob.escape(module.name)}") for depth in ("", "*/", "*/*/"))
    ]
    places += [folder / module for folder in here.parents if (folder / module).is_file()]
    hint = f"the path is relative to the current folder, {here}, and not to the configuration's file"
    if not places:
        return hint
    near = os.path.relpath(places[0])
    return f'{hint}; such a file is there as {near}: recipe = "{near}:{attribute}"'


def returns_recipe(builder: Function) -> bool:
    """Return whether a callable is annotated to return a `Recipe`, or is a subclass of it.

    The annotation may be in quotes, even if only a type checker can resolve it. For a `functools.partial`, a decorated
    function or an object with ``__call__``, the annotation of the function inside counts.
    """
    if isinstance(builder, type):
        return issubclass(builder, Recipe)
    function = find_inner(builder)
    found = resolve(getattr(function, "__annotations__", {}).get("return"), function)
    if isinstance(found, str):
        return is_last_part(found, "Recipe")
    return isinstance(found, type) and issubclass(found, Recipe)


def build_recipe(name: str, settings: Mapping[str, Any], device: object = None) -> tuple[Recipe, dict[str, Any]]:
    """Build a recipe. Return the recipe, and the settings that it was built with, including defaults.

    Args:
        device: the ``torch.device`` to train on, for a function that takes it.

    Raises:
        RecipeError: the recipe can't be found, its settings are wrong, or its code raised.
    """
    builder = find_program(name)
    arguments = make_arguments(builder, settings, device)
    try:
        recipe = builder(**arguments)
    except HoldfastError:
        raise
    except Exception as error:
        raise make_build_error(name, error) from error
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe {name!r}: expected a holdfast.Recipe, found a {type(recipe).__name__}")
    return recipe, resolve_settings(builder, settings)


def default_settings(name: str) -> dict[str, Any]:
    """Return the default values of a recipe's settings."""
    return list_defaults(find_program(name))


def make_build_error(name: str, error: Exception) -> RecipeError:
    """Return the error for a function that raised before its first step."""
    return RecipeError(
        f"recipe {name!r} can't be built: {describe_error(error)}",
        hint=find_hint(error) or IN_LOG,
    )
