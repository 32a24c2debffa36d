"""The table of all metrics: name, unit, labels and meaning, one row for each metric, for all exporters."""

from dataclasses import dataclass
from typing import Literal

# The words for units in Prometheus's names of metrics, as OpenTelemetry's specification translates them. Source:
# https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
WORDS = {"s": "seconds", "By": "bytes", "1": "ratio", "{unit}/s": "per_second"}


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: the metric's name in OpenTelemetry.
        kind: ``counter`` or ``gauge``; a counter only rises while a process lives.
        unit: the unit in UCUM's spelling; ``1`` for a fraction, empty for a number without a unit.
        meaning: a sentence for a person.
        labels: the labels of the metric's series, besides ``run``.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def exposed(self) -> str:
        """Return the metric's name in Prometheus. OpenTelemetry's collector makes the same name."""
        parts = [self.name.replace(".", "_"), WORDS.get(self.unit, ""), "total" if self.kind == "counter" else ""]
        return "_".join(filter(None, parts))


_ROWS = (
    Metric("holdfast.attempt", "gauge", "", "Number of the attempt that trains the run."),
    Metric("holdfast.attempt.age", "gauge", "s", "Seconds since the attempt began."),
    Metric("holdfast.run.complete", "gauge", "", "1 if all steps of the run are committed, 0 before."),
    Metric("holdfast.run.steps", "gauge", "{step}", "Steps of the whole run."),
    Metric("holdfast.step", "gauge", "{step}", "Newest step that the ranks have reported."),
    Metric("holdfast.step.duration", "gauge", "s", "Seconds per step since the last report, including pauses."),
    Metric("holdfast.throughput", "gauge", "{unit}/s", "Samples or other units per second.", ("unit",)),
    Metric("holdfast.mfu", "gauge", "1", "Fraction of the devices' peak FLOP/s that the model's FLOPs need."),
    Metric("holdfast.commits", "counter", "{commit}", "Commits, by reason.", ("reason",)),
    Metric("holdfast.commit.age", "gauge", "s", "Seconds since the newest commit."),
    Metric("holdfast.commit.interval", "gauge", "s", "Seconds between the last two commits, or in the last chunk."),
    Metric("holdfast.train", "counter", "s", "Seconds spent in committed steps."),
    Metric("holdfast.stall", "counter", "s", "Seconds for which training paused for saves."),
    Metric("holdfast.save", "counter", "s", "Seconds from the copy of a state until the state was durable."),
    Metric("holdfast.durable", "counter", "s", "Seconds from the last step of a chunk until its commit counted."),
    Metric("holdfast.checkpoint", "counter", "By", "Bytes of the committed checkpoints."),
    Metric("holdfast.restore", "counter", "s", "Seconds in which checkpoints were read, verified and judged."),
    Metric(
        "holdfast.verdicts", "counter", "{verdict}", "Checks of checkpoints, by check and result.", ("judge", "result")
    ),
    Metric("holdfast.goodput", "gauge", "1", "Productive fraction of the available time."),
    Metric("holdfast.spent", "gauge", "s", "Seconds of the run's life, by bucket of its ledger.", ("bucket",)),
    Metric("holdfast.restarts", "counter", "{attempt}", "Attempts that ended early, by reason.", ("reason",)),
    Metric("holdfast.host.failures", "counter", "{attempt}", "Attempts that died on a machine.", ("host",)),
    Metric(
        "holdfast.rank.restarts", "counter", "{failure}", "Failures of the attempt's ranks, by reason.", ("reason",)
    ),
    Metric("holdfast.rank.step", "gauge", "{step}", "Current step of a rank of this machine.", ("rank",)),
    Metric(
        "holdfast.rank.lag",
        "counter",
        "s",
        "Seconds for which the other ranks have waited for a rank, on average.",
        ("rank",),
    ),
)
METRICS = {row.name: row for row in _ROWS}
