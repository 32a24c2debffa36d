"""The import of a class that the user has written, which a setting or a store's URL names as ``module:Class``.

Importing a module runs its code. So the caller first checks that the operator allows the class.
"""

import contextlib
import importlib
import importlib.util
from typing import TypeVar

from holdfast.errors import ConfigError
from holdfast.store.modules import search_current_folder

T = TypeVar("T")


def find_module(setting: str, name: str) -> None:
    """Check that the module of a class exists, without importing it.

    The current folder joins ``sys.path``, so that `load_class` finds the module.

    Args:
        setting: the setting that names the class, for the message.

    Raises:
        ConfigError: there is no such module.
    """
    module = name.partition(":")[0]
    search_current_folder(module)
    found = None
    with contextlib.suppress(ImportError):  # a parent package can't be imported
        found = importlib.util.find_spec(module)
    if found is None:
        hint = "start the command in the folder that contains the module, or add this folder to PYTHONPATH"
        raise ConfigError(f"{setting}: there is no module {module}", hint=hint)


def load_class(setting: str, name: str, base: type[T]) -> type[T]:
    """Import a class, and return the class.

    Args:
        setting: the setting that names the class, for the message.
        base: the class from which it must be derived.

    Raises:
        ConfigError: the class can't be imported, or isn't a subclass of ``base``.
    """
    find_module(setting, name)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # catch any error, because the user's module may raise it
        raise ConfigError(f"{setting}: {name} can't be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        package = base.__module__.rpartition(".")[0]
        hint = f"class {attribute}({package}.{base.__name__}): ..."
        raise ConfigError(f"{setting}: {name} is no {base.__name__}", hint=hint)
    return found
