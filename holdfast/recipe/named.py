"""User-defined classes that a setting names as ``module:Class``. ``HOLDFAST_ALLOWED_RECIPES`` governs them, too."""

from typing import TypeVar

from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe.permission import RECIPES, check_recipe
from holdfast.store.own import find_module, load_class

T = TypeVar("T")


def check_class(setting: str, name: str) -> None:
    """Check that a class may be imported and that its module exists, without importing it.

    Args:
        setting: the setting that names the class, for the message.

    Raises:
        ConfigError: the operator doesn't allow the class, or there is no such module.
    """
    try:
        check_recipe(name)
    except RecipeError as error:
        raise ConfigError(f"{setting}: {name} is not allowed on this machine by {RECIPES}", hint=error.hint) from None
    find_module(setting, name)


def import_class(setting: str, name: str, base: type[T]) -> type[T]:
    """Import a class, and return it.

    Args:
        setting: the setting that names the class, for the message.
        base: the class that it has to be a subclass of.

    Raises:
        ConfigError: the operator doesn't allow the class, it can't be imported, or it isn't a subclass of ``base``.
    """
    check_class(setting, name)
    return load_class(setting, name, base)
