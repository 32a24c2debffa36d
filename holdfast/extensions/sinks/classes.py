"""The classes of sinks: check whether a sink can be used on this machine, and import it at its first use."""

import importlib
import importlib.util
from collections.abc import Iterable

from holdfast.errors import ConfigError
from holdfast.looking.sinks import Facts, Sink
from holdfast.recipe.named import check_class, import_class
from holdfast.terminal.distribution import spell_install

# The sinks' classes, by the names that `log.sinks` accepts besides ``module:Class``. A sink's module is imported at its
# first use.
CLASSES = {
    "tensorboard": "holdfast.extensions.sinks.tensorboard:TensorBoard",
    "wandb": "holdfast.extensions.sinks.wandb:Wandb",
}
SETTING = "log.sinks"


def check_usable(names: Iterable[str]) -> None:
    """Check that these sinks can be used on this machine, without importing their libraries.

    Raises:
        ConfigError: a sink's library isn't installed, or a sink of the user's own is missing or not allowed.
    """
    for name in names:
        if name not in CLASSES:
            check_class(SETTING, name)
        elif importlib.util.find_spec(name) is None:
            raise ConfigError(f"{SETTING}: {name} is not installed", hint=spell_install(name))


def make_sink(name: str, facts: Facts) -> Sink:
    """Import a sink's module, and return the sink of a run.

    Raises:
        ConfigError: a sink of the user's own can't be imported.
    """
    if name not in CLASSES:
        return import_class(SETTING, name, Sink)(facts)
    module, _, cls = CLASSES[name].partition(":")
    sink: Sink = getattr(importlib.import_module(module), cls)(facts)
    return sink
