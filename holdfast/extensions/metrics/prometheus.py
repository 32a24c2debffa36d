"""The exporter for Prometheus: a small HTTP server in the attempt's process, which serves the readings at /metrics."""

import logging
import threading
import time
from collections.abc import Iterator
from socketserver import BaseServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.config.metrics import MetricsTarget
from holdfast.extensions.metrics.readings import Readings
from holdfast.extensions.metrics.spans import DeadAttempt, SpanRecord
from holdfast.extensions.metrics.table import METRICS

log = logging.getLogger(__name__)

# Seconds between two tries of the ports while all are in use: the process of the previous attempt may still be ending.
RETRY_S = 5.0
# A complete run waits for one more scrape, so that Prometheus sees that it is complete. The wait is at most 1.5 times
# the time between the last two scrapes. After a single scrape, USUAL_S is used as that time; it is the interval in
# Prometheus's own example.
USUAL_S, MOST_S, TIMES = 15.0, 60.0, 1.5


class PrometheusExporter:
    """Serves the readings on the first free port of the target."""

    def __init__(self, target: MetricsTarget, readings: Readings) -> None:
        self._target, self._readings = target, readings
        self._registry = CollectorRegistry(auto_describe=False)
        self._collector = _ReadingsCollector(readings)
        self._registry.register(self._collector)
        self._server: BaseServer | None = None
        self._next_try, self._has_warned = 0.0, False

    def tend(self) -> None:
        """Start the server on a free port, if no earlier call has succeeded."""
        if self._server is not None or time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + RETRY_S
        reason = ""
        for port in self._target.ports:
            try:
                self._server = start_http_server(port, self._target.host, self._registry)[0]
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            host = f"[{self._target.host}]" if ":" in self._target.host else self._target.host
            log.info("metrics: http://%s:%d/metrics", host, port)
            return
        if not self._has_warned:
            log.warning("%s", self._explain(reason))
        self._has_warned = True

    def _explain(self, reason: str) -> str:
        ports = self._target.ports
        which = f"port {ports[0]}" if len(ports) == 1 else f"none of the ports {ports[0]}-{ports[-1]}"
        can = "can't be served on" if len(ports) == 1 else "can be served on"
        hint = f"log.metrics = prometheus:{ports[0]}-{ports[0] + 7} takes the first free port of eight"
        hint = f" ({hint})" if len(ports) == 1 and ports[0] + 7 <= 65535 else ""
        return f"metrics {can} {which} of {self._target.host}: {reason}; the run continues, and tries again{hint}"

    def add(self, span: SpanRecord) -> None:
        """Ignore a span: Prometheus has no spans."""

    def add_dead(self, dead: DeadAttempt) -> None:
        """Ignore a span: Prometheus has no spans."""

    def close(self, ended: float, attributes: dict[str, str | int | float], *, is_complete: bool) -> None:
        """Wait for a last scrape, if the run is complete and has been scraped; then release the port."""
        if self._server is None:
            return
        if is_complete:
            self._collector.await_scrape()
        self._server.shutdown()
        self._server.server_close()


class _ReadingsCollector:
    """A collector that returns the readings to a scrape, and records the time of the scrape."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._scraped = threading.Condition()
        self._last, self._interval_s = 0.0, 0.0
        self._is_awaited = self._is_answered = False

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their values."""
        is_awaited = self._is_awaited  # read first: a scrape that began before the wait may return old values
        for metric in METRICS.values():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            found = family(metric.exposed, metric.meaning, labels=[*self._readings.common, *metric.labels])
            for labels, value in self._readings.read(metric):
                found.add_metric([*labels.values()], value)
            if found.samples:
                yield found
        with self._scraped:
            now = time.monotonic()
            self._interval_s = now - self._last if self._last else 0.0
            self._last = now
            self._is_answered |= is_awaited
            self._scraped.notify_all()

    def await_scrape(self) -> None:
        """If Prometheus has scraped before, wait until a new scrape has been answered, or the time is up."""
        with self._scraped:
            if self._last:
                self._is_awaited = True
                self._scraped.wait_for(lambda: self._is_answered, min(TIMES * self._interval_s or USUAL_S, MOST_S))
