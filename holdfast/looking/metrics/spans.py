"""Spans: the named stretches of an attempt's time that a tracing system draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpanRecord:
    """A stretch of time in an attempt.

    Attributes:
        name: ``chunk``, ``save`` or ``restore``; the attempt's own span is its exporter's.
        began, ended: in seconds since 1970.
        children: the spans within it.
    """

    name: str
    began: float
    ended: float
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    children: tuple["SpanRecord", ...] = ()
