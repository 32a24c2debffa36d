"""The current values of all metrics. The attempt writes them, and an exporter reads them in its own thread."""

import threading
from collections.abc import Callable, Mapping

from holdfast.extensions.metrics.table import METRICS, Metric

Labels = tuple[str, ...]


class Readings:
    """The current value of each series. Every method may be called from any thread.

    Attributes:
        common: the labels that every series has.
    """

    def __init__(self, common: Mapping[str, str]) -> None:
        self.common = dict(common)
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
        self._followed: dict[str, Callable[[], float]] = {}
        self._lock = threading.Lock()

    def put(self, name: str, value: float, *labels: str) -> None:
        """Set a series to a value. ``labels`` are the values of the metric's labels, in the table's order."""
        with self._lock:
            self._values[name][labels] = value

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a counter. ``labels`` are as in `put`."""
        with self._lock:
            self._values[name][labels] = self._values[name].get(labels, 0.0) + value

    def follow(self, name: str, measure: Callable[[], float]) -> None:
        """Compute a metric's value by a function whenever the metric is read, for example the newest commit's age."""
        with self._lock:
            self._followed[name] = measure

    def read(self, metric: Metric) -> list[tuple[dict[str, str], float]]:
        """Return a pair of labels and value for each series of a metric; an empty list if it has no value yet."""
        with self._lock:
            series, measure = dict(self._values[metric.name]), self._followed.get(metric.name)
        if measure is not None:
            series[()] = measure()
        return [
            (self.common | dict(zip(metric.labels, labels, strict=True)), value) for labels, value in series.items()
        ]
