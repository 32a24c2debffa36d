"""Spans: the named stretches of an attempt's time that a tracing system draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpanRecord:
    """A stretch of time in an attempt.

    Attributes:
        name: ``chunk``, ``save`` or ``restore``. The exporter itself makes the span of the whole attempt.
        began, ended: in seconds since 1970.
        children: the spans within this span.
    """

    name: str
    began: float
    ended: float
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    children: tuple["SpanRecord", ...] = ()


@dataclass(frozen=True)
class DeadAttempt:
    """An attempt that died before it could send its own span, as described by the run's records.

    Attributes:
        key: the token in the attempt's record, from which the ids of its trace and span are derived; empty if the
            record has no token.
        began, ended: in seconds since 1970; the end is the recorded time of the attempt's last commit or step.
        message: how the attempt ended, as text for a person.
    """

    number: int
    key: str
    began: float
    ended: float
    message: str
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
