"""Canonical JSON, and the spellings of numbers that JSON can't hold.

Equal values give equal bytes on every machine. Content ids, fingerprints, signatures and checksums rely on that. JSON
has no NaN and no infinity; RFC 8785 has no whole number beyond 2**53 and writes 1.0 as 1. Such numbers are spelled in
one of these ways, which can't change, since they are on disk:

================  ================================  ================================================
`mark_int`        ``{"$int": "9007199254740993"}``  in settings and in states
`mark_float`      ``{"$float": "nan"}``             in settings, where 1.0 and 1 are the same
`mark_exactly`    ``{"$float": "0x1.8p+1"}``        in states, to the bit
`spell_floats`    ``"nan"``                         in the trail
`finite_or_none`  ``null``                          in metrics and probes: the number is missing
================  ================================  ================================================

Source: RFC 8785 (JSON Canonicalization Scheme).
"""

import math
from typing import Any

import rfc8785

# RFC 8785 has only IEEE doubles, which are not exact for larger whole numbers.
MAX_EXACT_INT = 2**53 - 1


def dump_json(value: Any) -> bytes:
    """Return a JSON value as canonical JSON.

    Raises:
        rfc8785.CanonicalizationError: the value holds a number that JSON lacks, or is not a JSON value.
    """
    return rfc8785.dumps(value)


def mark_int(value: int) -> int | dict[str, str]:
    """Return a whole number in a form that canonical JSON can hold."""
    return value if abs(value) <= MAX_EXACT_INT else {"$int": str(value)}


def mark_float(value: float) -> float | dict[str, str]:
    """Return a number in a form that JSON can hold. Canonical JSON then writes 1.0 as 1 and -0.0 as 0."""
    return value if math.isfinite(value) else {"$float": repr(value)}


def mark_exactly(value: float) -> float | dict[str, str]:
    """Return a number in a form that canonical JSON keeps to the bit, distinct from an int; see `read_exactly`."""
    is_plain = math.isfinite(value) and not value.is_integer()
    return value if is_plain else {"$float": value.hex()}


def read_exactly(value: Any) -> float:
    """Return the number that `mark_exactly` was given.

    Raises:
        KeyError, TypeError, ValueError: the value spells no number.
    """
    return float.fromhex(value["$float"]) if isinstance(value, dict) else float(value)


def spell_floats(value: Any) -> Any:
    """Return a value, or a dict of values, with NaN and infinity replaced by strings."""
    if isinstance(value, dict):
        return {key: spell_floats(item) for key, item in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else repr(value)


def finite_or_none(value: float) -> float | None:
    """Return a finite number unchanged, and None for NaN and infinity."""
    return value if math.isfinite(value) else None
