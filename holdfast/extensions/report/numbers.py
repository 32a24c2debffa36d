"""Numbers and times as the report's pages write them."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime

UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def show_number(value: float | None) -> str:
    """Return a number with four significant digits; empty for None."""
    if value is None or not math.isfinite(value):
        return "" if value is None else "not finite"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def show_seconds(seconds: float) -> str:
    """Return a duration in its two largest units: ``3 h 12 min``; below a minute in seconds."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    index = next(place for place, (_, size) in enumerate(UNITS) if seconds >= size)
    (unit, size), (smaller, small) = UNITS[index], UNITS[index + 1]
    whole, rest = divmod(round(seconds / small), round(size / small))
    return f"{whole} {unit} {rest} {smaller}" if rest else f"{whole} {unit}"


def show_time(time: str) -> str:
    """Return a record's time in UTC, to the second: ``2026-01-31 12:00:00``."""
    return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def round_all(values: Iterable[float]) -> list[float | None]:
    """Return numbers with six significant digits, for JSON; None in place of a number that isn't finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
