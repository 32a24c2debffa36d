"""The target of a run's metrics, which ``log.metrics`` names: ``prometheus:PORT`` or ``otlp:URL``."""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

EXPECTED = "expected prometheus:PORT, such as prometheus:9464, or otlp:URL, such as otlp:http://127.0.0.1:4318"
LOOPBACK = "127.0.0.1"
# Matches host and ports of ``prometheus:``; an IPv6 address is in brackets.
_LISTENING = re.compile(r"((?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):)?(?P<first>\d+)(-(?P<last>\d+))?")
HIGHEST_PORT = 65535


@dataclass(frozen=True)
class MetricsTarget:
    """The target of a run's metrics.

    Attributes:
        kind: ``prometheus`` to serve the metrics over HTTP, ``otlp`` to send them to a receiver.
        host: the address on which to serve; empty for ``otlp``.
        ports: the ports on which to serve; the first free port is used. Empty for ``otlp``.
        url: the base of the receiver's URLs; empty for ``prometheus``.
    """

    kind: Literal["prometheus", "otlp"]
    host: str = ""
    ports: range = range(0)
    url: str = ""


def read_metrics_target(text: str) -> MetricsTarget:
    """Return the target that a value of ``log.metrics`` names.

    Raises:
        ValueError: the text doesn't name a target.
    """
    kind, _, place = text.partition(":")
    if kind == "prometheus":
        return _read_listening(place)
    if kind == "otlp":
        return MetricsTarget("otlp", url=_read_url(place))
    raise ValueError(EXPECTED)


def _read_listening(place: str) -> MetricsTarget:
    found = _LISTENING.fullmatch(place)
    if found is None:
        raise ValueError(f"{EXPECTED}; an address and several ports are prometheus:0.0.0.0:9464-9471")
    first = int(found["first"])
    last = int(found["last"] or first)
    if not 1 <= first <= last <= HIGHEST_PORT:
        raise ValueError(f"expected ports from 1 to {HIGHEST_PORT}, the lower one first")
    return MetricsTarget("prometheus", (found["host"] or LOOPBACK).strip("[]"), range(first, last + 1))


def _read_url(url: str) -> str:
    parts = urlsplit(url)
    try:
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_url = False
    if not is_url:
        raise ValueError(f"{EXPECTED}; the URL begins with http:// or https://")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "the configuration is stored with the run, so its URL may hold no credentials: "
            "export OTEL_EXPORTER_OTLP_HEADERS instead"
        )
    return url.rstrip("/")
