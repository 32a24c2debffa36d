"""Classes of the user's own that a setting names, ``module:Class``, as it names a recipe."""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TypeVar

from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe.permission import RECIPES, check_recipe

T = TypeVar("T")

NO_MODULE = "run from the folder that holds it, or put that folder on PYTHONPATH"


def check_class(setting: str, name: str) -> None:
    """Return if a class may be imported, and its module is there. Nothing of it is imported.

    Args:
        setting: the setting that names it, for the message.

    Raises:
        ConfigError: the operator doesn't allow it, or there is no such module.
    """
    try:
        check_recipe(name)
    except RecipeError as error:
        raise ConfigError(f"{setting}: {name} is not allowed on this machine: {RECIPES}", hint=error.hint) from None
    module = name.partition(":")[0]
    _search_here()
    found = None
    with contextlib.suppress(ImportError):  # of a package around it
        found = importlib.util.find_spec(module)
    if found is None:
        raise ConfigError(f"{setting}: there is no module {module}", hint=NO_MODULE)


def import_class(setting: str, name: str, base: type[T]) -> type[T]:
    """Import a class, and return it.

    Args:
        setting: the setting that names it, for the message.
        base: what it has to be a subclass of.

    Raises:
        ConfigError: the operator doesn't allow it, it can't be imported, or it is another class.
    """
    check_class(setting, name)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of the user's module
        raise ConfigError(f"{setting}: {name} can't be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{setting}: {name} is no {base.__name__}", hint=f"class {attribute}({base.__name__}): ...")
    return found


def _search_here() -> None:
    """Let imports search the current folder last, as those of a rank search it first."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
