"""Metric sinks: TensorBoard, Weights & Biases, Trackio and MLflow show a run as one curve, however often the run dies.

A sink gets its numbers from commits alone, so that it never draws a step which the run later loses. Each sink is a
process of its own, `python -m holdfast.looking.sinks`. The attempt starts this process, and never waits for it during
training. So no sink's library is ever loaded in a training process.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterable

from holdfast.errors import ConfigError
from holdfast.looking.sinks.points import Point
from holdfast.looking.sinks.sink import Facts, Sink
from holdfast.recipe.named import check_class, import_class
from holdfast.terminal.distribution import spell_install

# The sinks' classes, by the names that `log.sinks` accepts besides ``module:Class``. A sink's module is imported at its
# first use.
CLASSES = {
    "tensorboard": "holdfast.looking.sinks.tensorboard:TensorBoard",
    "wandb": "holdfast.looking.sinks.wandb:Wandb",
    "trackio": "holdfast.looking.sinks.trackio:Trackio",
    "mlflow": "holdfast.looking.sinks.mlflow:MLflow",
}
# The sinks that need a library. The MLflow sink needs none, because it calls MLflow's server over HTTP.
LIBRARIES = {"tensorboard", "wandb", "trackio"}
SETTING = "log.sinks"
MLFLOW_URI = "MLFLOW_TRACKING_URI"


def check_usable(names: Iterable[str]) -> None:
    """Check that these sinks can be used on this machine, without importing their libraries.

    Raises:
        ConfigError: a sink's library isn't installed, the address of MLflow's server isn't set, or a sink of the user's
            own is missing or not allowed.
    """
    for name in names:
        if name not in CLASSES:
            check_class(SETTING, name)
        if name in LIBRARIES and importlib.util.find_spec(name) is None:
            raise ConfigError(f"{SETTING}: {name} is not installed", hint=spell_install(name))
        if name == "mlflow" and not os.environ.get(MLFLOW_URI, "").startswith(("http://", "https://")):
            raise ConfigError(
                f"{SETTING}: mlflow needs the address of a tracking server in {MLFLOW_URI}",
                hint=f"export {MLFLOW_URI}=http://127.0.0.1:5000",
            )


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


__all__ = ["CLASSES", "Facts", "Point", "Sink", "check_usable", "make_sink"]
