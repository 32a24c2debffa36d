"""What monitoring gets of a run: scrapes over HTTP as Prometheus makes them, and a receiver of OTLP."""

import contextlib
import gzip
import http.client
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Series:
    """Return each series that is served on a port of the loopback interface, by name and labels, ``run`` left out.

    Raises:
        OSError: nothing is served there.
        http.client.HTTPException: the server died within its answer.
    """
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(each for each in sample.labels.items() if each[0] != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float | None:
    """Return the value of one series; None if it isn't there."""
    return series.get((name, frozenset(labels.items())))


@contextlib.contextmanager
def scraped(port: int, every_s: float = 0.05) -> Iterator[list[Series]]:
    """Scrape a port again and again during the block; yield the list of what came."""
    found: list[Series] = []
    done = threading.Event()

    def work() -> None:
        while not done.wait(every_s):
            with contextlib.suppress(OSError, http.client.HTTPException):
                found.append(scrape(port))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


@dataclass
class Received:
    """The metrics and spans that a receiver has got.

    Attributes:
        url: the base of its URLs.
        spans: each span, with its attributes as a dictionary ``facts``.
        points: the points of each metric, oldest first: attributes and value.
        resources: the attributes of the senders.
    """

    url: str
    spans: list[Any] = field(default_factory=list)
    points: dict[str, list[tuple[dict[str, Any], float]]] = field(default_factory=dict)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        """Decode a request."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        if path == "/v1/traces":
            for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(read_attributes(sent.resource.attributes))
                self.spans += [span for scope in sent.scope_spans for span in scope.spans]
            return
        assert path == "/v1/metrics", path
        for sent in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.resources.append(read_attributes(sent.resource.attributes))
            for metric in (each for scope in sent.scope_metrics for each in scope.metrics):
                data = getattr(metric, metric.WhichOneof("data"))
                for point in data.data_points:
                    number = getattr(point, point.WhichOneof("value"))
                    self.points.setdefault(metric.name, []).append((read_attributes(point.attributes), number))


def read_attributes(attributes: Any) -> dict[str, Any]:
    """Return attributes of OpenTelemetry's protocol as a dictionary."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextlib.contextmanager
def otlp_receiver(status: int = 200, hangs: threading.Event | None = None) -> Iterator[Received]:
    """Receive metrics and spans over HTTP during the block.

    Args:
        status: the status of each answer.
        hangs: each request waits for this event before it is answered.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            if hangs is not None:
                hangs.wait()
            elif status == 200:
                received.take(self.path, body)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        received = Received(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield received
        finally:
            if hangs is not None:
                hangs.set()
            server.shutdown()
            thread.join()
