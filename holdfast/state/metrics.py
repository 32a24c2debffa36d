"""The state of a metric of torchmetrics, whose ``state_dict`` is empty by default."""

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.state.attributes import Attributes

# The attributes that torch itself sets on a module.
OF_TORCH = vars(nn.Module()).keys()


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric, a wrapper of metrics, or a collection of metrics of torchmetrics."""
    kinds = {each.__name__ for each in type(value).__mro__ if each.__module__.partition(".")[0] == "torchmetrics"}
    return isinstance(value, nn.Module) and not kinds.isdisjoint({"Metric", "MetricCollection"})


class Metrics:
    """The plain attributes of a metric and of the metrics inside it that have changed since `run.keep`."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric = metric
        self._parts = {
            name: Attributes(functools.partial(metric.get_submodule, name), OF_TORCH.__contains__)
            for name, _ in metric.named_modules()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the metric's buffers, and the changed attributes of each metric by its path."""
        changed = {name: state for name, part in self._parts.items() if (state := part.state_dict())}
        return {"buffers": dict(self._metric.state_dict()), "attributes": changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._metric.load_state_dict(state["buffers"], strict=False)
        for name, part in self._parts.items():
            part.load_state_dict(state["attributes"].get(name, {}))
