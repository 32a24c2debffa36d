"""Metric sinks: TensorBoard, Weights & Biases, Trackio and MLflow show a run as one curve, however often it dies.

A sink is fed from commits alone, so that it never draws a step which a later commit doesn't contain. Each sink is a
process of its own, `python -m holdfast.looking.sinks`, which the attempt starts and never waits for while it trains. So
no sink's library is ever loaded beside training.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterable

from holdfast.errors import ConfigError
from holdfast.looking.sinks.sink import Facts, Sink

# The classes by the names that `log.sinks` takes. A module is imported only if its sink is configured.
CLASSES = {
    "tensorboard": "holdfast.looking.sinks.tensorboard:TensorBoard",
    "wandb": "holdfast.looking.sinks.wandb:Wandb",
    "trackio": "holdfast.looking.sinks.trackio:Trackio",
    "mlflow": "holdfast.looking.sinks.mlflow:MLflow",
}
# The sinks that write through a library. MLflow's is spoken to over HTTP.
LIBRARIES = {"tensorboard", "wandb", "trackio"}
MLFLOW_URI = "MLFLOW_TRACKING_URI"


def check_usable(names: Iterable[str]) -> None:
    """Return if these sinks can be used on this machine; no library is imported to find out.

    Raises:
        ConfigError: a sink's library isn't installed, or MLflow's server isn't named.
    """
    for name in names:
        if name in LIBRARIES and importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.sinks: {name} is not installed", hint=f"pip install 'holdfast[{name}]'")
        if name == "mlflow" and not os.environ.get(MLFLOW_URI, "").startswith(("http://", "https://")):
            raise ConfigError(
                f"log.sinks: mlflow needs the address of a tracking server in {MLFLOW_URI}",
                hint=f"export {MLFLOW_URI}=http://127.0.0.1:5000",
            )


def make_sink(name: str, facts: Facts) -> Sink:
    """Import a sink's module, and return the sink of a run."""
    module, _, cls = CLASSES[name].partition(":")
    sink: Sink = getattr(importlib.import_module(module), cls)(facts)
    return sink


__all__ = ["CLASSES", "Facts", "Sink", "check_usable", "make_sink"]
