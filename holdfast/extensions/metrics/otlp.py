"""The exporter for OpenTelemetry: sends the readings as metrics, and an attempt's spans, by OTLP over HTTP.

The threads of OpenTelemetry's SDK send metrics and spans. The queue and the time of each request are bounded: metrics
and spans that the receiver doesn't accept in time are dropped.
"""

import contextlib
import functools
import hashlib
import logging
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from holdfast import __version__
from holdfast.extensions.metrics.readings import Readings
from holdfast.extensions.metrics.spans import DeadAttempt, SpanRecord
from holdfast.extensions.metrics.table import METRICS, Metric

log = logging.getLogger(__name__)

EVERY_S = 10.0
# The longest time, in seconds, for one request including its retries.
WITHIN_S = 5.0
MOST_SPANS = 2048
# The longest wait, in seconds, until metrics and spans are sent at the end of an attempt. A stopped attempt waits less
# long than a complete attempt, because its machine may vanish soon.
COMPLETE_WITHIN_S, STOPPED_WITHIN_S = 5.0, 2.0
# The longest wait, in seconds, at the end of an attempt if the receiver didn't take the last request.
FAILING_WITHIN_S = 0.5
SCOPE = "holdfast"
# A pattern for the operating system's error text inside a message of the SDK's HTTP client.
CAUSE = re.compile(
    r"\[Errno -?\d+\] (?P<errno>[^')\"]+)|(?P<late>timed out)|(?P<code>code: \d.*)|error (?P<other>.+) enc"
)


class OtlpExporter:
    """Sends the readings every `EVERY_S` seconds, and an attempt's spans as children of the attempt's own span."""

    def __init__(self, url: str, readings: Readings, attempt: int, began: float, key: str = "") -> None:
        """
        Args:
            url: the base of the receiver's URLs, to which ``/v1/metrics`` and ``/v1/traces`` are added.
            began: when the attempt began, in seconds since 1970.
            key: the token in the attempt's record, from which the ids of the attempt's span and trace are derived. If
                this attempt is killed, the next attempt sends the killed attempt's span with the same ids. Empty for
                random ids.
        """
        self._readings, self._ids = readings, _Ids()
        run = readings.common["run"]
        resource = Resource.create(
            {"service.name": SCOPE, "service.version": __version__, "service.instance.id": run,
             "host.name": platform.node()}
        )  # fmt: skip
        self._told = told = _Told(url)
        metrics = told.watch(OTLPMetricExporter(endpoint=f"{url}/v1/metrics", timeout=WITHIN_S))
        spans = told.watch(OTLPSpanExporter(endpoint=f"{url}/v1/traces", timeout=WITHIN_S))
        reader = _Reader(metrics, 1000 * EVERY_S, 1000 * WITHIN_S)
        self._meters = MeterProvider([reader], resource, shutdown_on_exit=False)
        reader.is_registered = True
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
        self._tracers.add_span_processor(BatchSpanProcessor(spans, MOST_SPANS, 1000 * EVERY_S))
        self._tracer = self._tracers.get_tracer(SCOPE, __version__)
        self._make_instruments()
        self._root = self._begin_attempt(attempt, began, key)
        log.info("metrics and spans: %s", url)

    def _begin_attempt(self, number: int, began: float, key: str) -> Any:
        attributes: dict[str, str | int] = {"holdfast.run": self._readings.common["run"], "holdfast.attempt": number}
        with self._ids.following_from(key):
            return self._tracer.start_span("attempt", Context(), start_time=_to_ns(began), attributes=attributes)

    def _make_instruments(self) -> None:
        meter = self._meters.get_meter(SCOPE, __version__)
        for metric in METRICS.values():
            make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            make(metric.name, [functools.partial(self._observe, metric)], metric.unit, metric.meaning)

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        yield from (Observation(value, labels) for labels, value in self._readings.read(metric))

    def tend(self) -> None:
        """Do nothing: the SDK's own threads send the metrics."""

    def add(self, span: SpanRecord) -> None:
        """Queue a span and its children; drop the oldest ones if the queue is full."""
        self._add(span, self._root)

    def _add(self, span: SpanRecord, parent: Any) -> None:
        context = set_span_in_context(parent)
        own = self._tracer.start_span(span.name, context, start_time=_to_ns(span.began), attributes=span.attributes)
        for child in span.children:
            self._add(child, own)
        own.end(_to_ns(span.ended))

    def add_dead(self, dead: DeadAttempt) -> None:
        """Queue the span of an attempt that died. The spans of the attempt's chunks name this span as their parent."""
        span = self._begin_attempt(dead.number, dead.began, dead.key)
        span.set_attributes(dead.attributes)
        span.set_status(Status(StatusCode.ERROR, dead.message))
        span.end(_to_ns(dead.ended))

    def close(self, ended: float, attributes: dict[str, str | int | float], *, is_complete: bool) -> None:
        """Send the last metrics and spans; wait a few seconds at most until they are sent."""
        within_s = COMPLETE_WITHIN_S if is_complete else STOPPED_WITHIN_S
        within_s = FAILING_WITHIN_S if self._told.is_failing else within_s
        self._root.set_attributes(attributes)
        self._root.end(_to_ns(ended))
        # Each shutdown waits for a request under way, which may take all the time, so call both at once.
        calls: list[Callable[[], object]] = [
            functools.partial(self._meters.shutdown, 1000 * within_s),
            self._tracers.shutdown,
        ]
        threads = [threading.Thread(target=call, name="metrics-end", daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + within_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self._told.tell(f"no answer within {within_s:g} s")


class _Reader(PeriodicExportingMetricReader):  # type: ignore[misc]
    """A reader that collects nothing before a provider has it.

    The SDK starts a reader's thread first; on a busy machine the thread would log that it isn't registered yet.
    """

    is_registered = False

    def collect(self, timeout_millis: float = 10_000) -> None:
        """Send the current metrics."""
        if self.is_registered:
            super().collect(timeout_millis)


class _Ids(RandomIdGenerator):  # type: ignore[misc]
    """Random ids, except the ids of an attempt's own span and trace, which are derived from a key."""

    def __init__(self) -> None:
        self._fixed: tuple[int, int] | None = None

    @contextlib.contextmanager
    def following_from(self, key: str) -> Iterator[None]:
        """Inside the block, derive the ids of a new span and trace from a key; use random ids if the key is empty."""
        digest = hashlib.sha256(key.encode()).digest()
        self._fixed = (int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])) if key else None
        yield
        self._fixed = None

    def generate_trace_id(self) -> int:
        """Return the id of a new trace."""
        return self._fixed[0] if self._fixed else super().generate_trace_id()

    def generate_span_id(self) -> int:
        """Return the id of a new span."""
        return self._fixed[1] if self._fixed else super().generate_span_id()


class _Told(logging.Handler):
    """Logs one warning if requests to the receiver fail. The SDK would log several lines for each request.

    Attributes:
        is_failing: whether the last finished request has failed.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._reason, self._has_warned = url, "", False
        self._telling = threading.Lock()  # one thread sends metrics, another sends spans
        self.is_failing = False

    def watch(self, exporter: Any) -> Any:
        """Let an exporter report its failures to this object, and return the exporter."""
        logger = logging.getLogger(type(exporter).__module__)
        logger.handlers, logger.propagate = [self], False
        export = exporter.export

        def call(*arguments: Any, **options: Any) -> Any:
            result = export(*arguments, **options)
            self.is_failing = result.name != "SUCCESS"
            if self.is_failing:
                self.tell(self._reason or "unknown reason")
            return result

        exporter.export = call
        return exporter

    def tell(self, reason: str) -> None:
        """Log why requests fail, at the first call only."""
        with self._telling:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            log.warning(
                "metrics and spans can't be sent to %s: %s; the run continues without sending them", self._url, reason
            )

    def emit(self, record: logging.LogRecord) -> None:
        """Find the reason for the failure in the first line that the SDK logs, and keep the reason."""
        text = record.getMessage()
        found = CAUSE.search(text)
        self._reason = self._reason or (found[found.lastgroup or 0] if found else text)


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)
