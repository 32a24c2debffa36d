"""Canonical JSON, and the notations for numbers that JSON can't hold.

Equal values give equal bytes on every machine. Content ids, fingerprints, signatures and checksums rely on this. JSON
has no NaN and no infinity. RFC 8785 has no whole number beyond 2**53, and writes 1.0 as 1. Such numbers are written in
one of these notations, which can't change, because files on disk use them:

================  ================================  ================================================
function          notation                          where it is written
================  ================================  ================================================
`mark_int`        ``{"$int": "9007199254740993"}``  in settings and in states
`mark_float`      ``{"$float": "nan"}``             in settings, where 1.0 and 1 are the same
`mark_exactly`    ``{"$float": "0x1.8p+1"}``        in states, to the bit
`spell_floats`    ``"nan"``                         in the trail
`finite_or_none`  ``null``                          in metrics and probes; the number is lost
================  ================================  ================================================

Source: RFC 8785 (JSON Canonicalization Scheme).
"""

import functools
import json
import math
import re
from typing import Any

import rfc8785

# RFC 8785 has only IEEE doubles, which can't hold every larger whole number exactly.
MAX_EXACT_INT = 2**53 - 1

# The package rfc8785 is pure Python, and every save waits for it: 34 ms for 0.4 MB of a state's tree. The library json
# takes 14 ms, checks included. It writes the same bytes except for some floats, keys that aren't text, and the order of
# keys beyond U+FFFF.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
_TEXT, _CONSTANTS = frozenset({str}), frozenset({bool, type(None)})
# In this range Python and RFC 8785 write a float with a fraction in the same way: with the same digits and without an
# exponent.
_PLAIN_FLOATS = 1e-4, 1e16
# Matches Python's notation for whole floats and for floats outside `_PLAIN_FLOATS`, between the characters that may
# surround a JSON number.
_OTHER_FLOAT = re.compile(r"([\[:,])(-?\d+(?:\.0|(?:\.\d+)?e[-+]\d+))(?=[],}])")
_BEYOND_UTF16_UNIT = re.compile("[\U00010000-\U0010ffff]")


def dump_json(value: Any) -> bytes:
    """Return a JSON value as canonical JSON.

    Raises:
        rfc8785.CanonicalizationError: the value is not a JSON value, or contains a number that JSON lacks.
    """
    written = _write_fast(value) if isinstance(value, dict | list) else None
    return rfc8785.dumps(value) if written is None else written


def _write_fast(value: Any) -> bytes | None:
    """Return the same bytes as `rfc8785.dumps`, but faster; None if only `rfc8785` can write or refuse the value."""
    try:
        text = _ENCODER.encode(value)  # refuses a value that contains itself, for which the next line would never end
        others = _count_other_floats(value)
        if others is None or (not text.isascii() and _BEYOND_UTF16_UNIT.search(text)):
            return None
        if others:
            text, found = _OTHER_FLOAT.subn(_rewrite, text)
            if found != others:  # the pattern has matched inside a string, too, which must not be changed
                return None
        return text.encode()
    except (TypeError, ValueError, RecursionError):
        return None


def _count_other_floats(value: Any) -> int | None:
    """Return the number of floats that the library json writes differently from RFC 8785; None if it can't be used.

    It can't be used for a value with a key that isn't text, a whole number beyond 2**53, or an object of a different
    type.
    """
    low, high = _PLAIN_FLOATS
    containers: list[Any] = [[value]]
    count = 0
    for container in containers:  # the loop appends inner lists and dicts
        for item in container:
            kind = type(item)
            if kind is str:
                continue
            if kind is dict:
                if not _TEXT.issuperset(map(type, item)):
                    return None
                containers.append(item.values())
            elif kind is list or kind is tuple:
                containers.append(item)
            elif kind is float:
                count += not low <= abs(item) < high or item.is_integer()
            elif kind is int:
                if abs(item) > MAX_EXACT_INT:
                    return None
            elif kind not in _CONSTANTS:
                return None
    return count


def _rewrite(found: re.Match[str]) -> str:
    return found[1] + _spell(found[2])


@functools.lru_cache(maxsize=1024)  # cached, because all parameter groups of an optimizer have the same eps
def _spell(number: str) -> str:
    return rfc8785.dumps(float(number)).decode()


def mark_int(value: int) -> int | dict[str, str]:
    """Return a whole number in a notation that canonical JSON can hold."""
    return value if abs(value) <= MAX_EXACT_INT else {"$int": str(value)}


def mark_float(value: float) -> float | dict[str, str]:
    """Return a number in a notation that JSON can hold. Canonical JSON then writes 1.0 as 1 and -0.0 as 0."""
    return value if math.isfinite(value) else {"$float": repr(value)}


def mark_exactly(value: float) -> float | dict[str, str]:
    """Return a float in a notation that canonical JSON keeps to the bit, and that differs from an int's."""
    is_plain = math.isfinite(value) and not value.is_integer()
    return value if is_plain else {"$float": value.hex()}


def read_exactly(value: Any) -> float:
    """Return the number from which `mark_exactly` has made the value.

    Raises:
        KeyError, TypeError, ValueError: the value isn't a notation of a number.
    """
    return float.fromhex(value["$float"]) if isinstance(value, dict) else float(value)


def spell_floats(value: Any) -> Any:
    """Return a value with a string in place of NaN or infinity. In a dict, replace them in all of its values."""
    if isinstance(value, dict):
        return {key: spell_floats(item) for key, item in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else repr(value)


def read_floats(value: Any) -> Any:
    """Return a value that `spell_floats` has returned with NaN and infinities in place of their strings."""
    if isinstance(value, dict):
        return {key: read_floats(item) for key, item in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def finite_or_none(value: float) -> float | None:
    """Return a finite number unchanged; for NaN and infinity, None."""
    return value if math.isfinite(value) else None
