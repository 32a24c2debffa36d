"""The exporters of metrics: which library each needs, and what each does."""

import importlib.util
from typing import Protocol

from holdfast.config.metrics import MetricsTarget
from holdfast.errors import ConfigError
from holdfast.extensions.metrics.readings import Readings
from holdfast.extensions.metrics.spans import DeadAttempt, SpanRecord
from holdfast.terminal.distribution import spell_install

SETTING = "log.metrics"
# A module that each kind of exporter needs.
LIBRARIES = {"prometheus": "prometheus_client", "otlp": "opentelemetry.exporter.otlp.proto.http"}


class Exporter(Protocol):
    """Sends readings (values of metrics) and spans out of the process. A single thread calls its methods."""

    def tend(self) -> None:
        """Do the exporter's regular work, if any is due. The attempt calls this every half second."""

    def add(self, span: SpanRecord) -> None:
        """Take a span of the attempt, to send it later."""

    def add_dead(self, dead: DeadAttempt) -> None:
        """Take the span of an earlier attempt that died before it could send its own span."""

    def close(self, ended: float, attributes: dict[str, str | int | float], *, is_complete: bool) -> None:
        """Deliver everything that is still queued, and end.

        Args:
            ended: when the attempt ended, in seconds since 1970.
            attributes: the attributes of the attempt's span.
            is_complete: whether the run is complete.
        """


def check_library(target: MetricsTarget) -> None:
    """Check that the library for a target (a value of ``log.metrics``) is installed, without importing the library.

    Raises:
        ConfigError: the library isn't installed.
    """
    try:
        found = importlib.util.find_spec(LIBRARIES[target.kind])
    except ModuleNotFoundError:  # a package that contains the module is missing
        found = None
    if found is None:
        library = LIBRARIES[target.kind].replace(".", "-") if target.kind == "otlp" else LIBRARIES[target.kind]
        raise ConfigError(f"{SETTING}: {library} is not installed", hint=spell_install(target.kind))


def make_exporter(target: MetricsTarget, readings: Readings, attempt: int, began: float, key: str = "") -> Exporter:
    """Import the library for a target, and return the target's exporter.

    Args:
        began: when the attempt began, in seconds since 1970.
        key: the token in the attempt's record; empty if it is unknown.
    """
    if target.kind == "prometheus":
        from holdfast.extensions.metrics.prometheus import PrometheusExporter

        return PrometheusExporter(target, readings)
    from holdfast.extensions.metrics.otlp import OtlpExporter

    return OtlpExporter(target.url, readings, attempt, began, key)
