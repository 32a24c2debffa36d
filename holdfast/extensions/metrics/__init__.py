"""Metrics and spans for a dashboard: Prometheus scrapes them, or OpenTelemetry's protocol (OTLP) carries them.

One table names all metrics, one set of readings holds their values, and two exporters carry them. The threads of an
exporter run in the attempt's process, not in a rank's, so a step never waits for them. An exporter's library is
imported only if the exporter is used.
"""

from typing import TYPE_CHECKING

from holdfast.extending import Extension

if TYPE_CHECKING:
    from holdfast.attempt import Observer
    from holdfast.config import RunConfig


def observe_metrics(config: "RunConfig") -> "list[Observer]":
    """Return the observer for ``log.metrics``; an empty list if the run exports no metrics."""
    if config.log.metrics is None:
        return []
    from holdfast.extensions.metrics.observer import make_measuring  # not imported by a run without metrics

    return make_measuring(config)


extension = Extension("metrics", observers=f"{__name__}:observe_metrics")
