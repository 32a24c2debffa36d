"""The HTTP server for Prometheus: what it waits for at the end of an attempt."""

import threading
import time

import pytest

from holdfast.config.metrics import read_metrics_target
from holdfast.extensions.metrics.readings import Readings
from tasks.server import free_port
from tests.support.scraped import scrape
from tests.support.waiting import WITHIN_S

pytestmark = pytest.mark.extras("prometheus_client")


@pytest.mark.parametrize(
    ("scrapes", "is_complete", "waits"), [(0, True, False), (1, False, False), (1, True, True), (2, True, True)]
)
def test_a_complete_run_that_is_scraped_waits_for_one_more_scrape(
    monkeypatch: pytest.MonkeyPatch, scrapes: int, is_complete: bool, waits: bool
) -> None:
    from holdfast.extensions.metrics import prometheus

    monkeypatch.setattr(prometheus, "USUAL_S", 2 * WITHIN_S)
    monkeypatch.setattr(prometheus, "TIMES", 1e9)
    monkeypatch.setattr(prometheus, "MOST_S", 2 * WITHIN_S)
    port, readings = free_port(), Readings({"run": "r"})
    readings.put("holdfast.attempt", 1)
    exporter = prometheus.PrometheusExporter(read_metrics_target(f"prometheus:{port}"), readings)
    exporter.tend()
    for _ in range(scrapes):
        assert scrape(port)
    closing = threading.Thread(target=lambda: exporter.close(time.time(), {}, is_complete=is_complete), daemon=True)
    closing.start()
    if waits:
        closing.join(1.0)
        assert closing.is_alive()
        assert scrape(port)
    closing.join(30)
    assert not closing.is_alive()
    with pytest.raises(OSError, match="refused"):
        scrape(port)
