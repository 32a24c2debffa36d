"""The values that count as hyperparameters: plain values that don't depend on the process or the machine."""

import enum
import hashlib
import re
import time
from typing import Any

import numpy as np
import torch

from holdfast.provenance.fingerprint import canonical_json, to_plain

LISTED_ITEMS = 64
A_DAY_S = 86_400.0
# For clocks that count seconds, milliseconds, microseconds or nanoseconds: the number of these units in a second.
CLOCKS = (1, 1e3, 1e6, 1e9)
LATEST = 1e19  # larger than the current time on any of these clocks
OF_A_PROCESS = re.compile(
    r"[/~]|[A-Za-z]:[\\/]|\w+://|.* at 0x[0-9a-f]+"  # a path, a URL, an object's address
    r"|\{?[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}\}?$"  # a UUID
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d"  # a time
    r"|(cpu|cuda|mps|xpu)(:\d+)?$"
)
SECRET = re.compile(r"(?i)secret|token|passw|credential|(api|access)_?key")
LEFT_OUT = object()
BEGAN_S = time.monotonic()
# Attributes that torch and accelerate set on modules and schedulers. They aren't hyperparameters.
SKIPPED = {"training", "forward", "optimizer", "call_super_init", "dump_patches"}
# Private attributes in which torch keeps the parts of a scheduler.
INNER = {"_schedulers", "_milestones", "_scale_fn_custom"}


def as_plain_json(value: Any) -> Any:
    """Return a value as plain JSON; LEFT_OUT if JSON can't hold it, or if it may differ between processes or machines.

    A long list becomes its SHA-256.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.dtype | torch.Size):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return LEFT_OUT if _is_of_a_process(value) else to_plain(value)
    if isinstance(value, list | tuple | set | frozenset) and value and all(_is_number_or_text(each) for each in value):
        items = to_plain(value)
        if len(items) <= LISTED_ITEMS:
            return items
        return hashlib.sha256(canonical_json(items)).hexdigest()
    return LEFT_OUT


def _is_number_or_text(value: Any) -> bool:
    return (value is None or isinstance(value, bool | int | float | str)) and not _is_of_a_process(value)


def _is_of_a_process(value: Any) -> bool:
    if isinstance(value, str):
        return OF_A_PROCESS.match(value) is not None
    if isinstance(value, bool) or value is None or abs(value) > LATEST:
        return False
    # A time from `time.monotonic` or `time.perf_counter` in this process has more digits than a constant would have.
    readings = (value / clock for clock in (1, 1e9))
    if any(BEGAN_S - 1 <= each <= time.monotonic() and each != round(each, 6) for each in readings):
        return True
    return any(abs(value / clock - time.time()) < A_DAY_S for clock in CLOCKS)


def is_public(key: str) -> bool:
    """Return whether an attribute with this name is public, and isn't one of torch's own attributes in `SKIPPED`."""
    return (not key.startswith("_") or key in INNER) and key not in SKIPPED


def is_hyperparameter(key: str, value: Any) -> bool:
    """Return whether a module's attribute is public, and its value plain and independent of process and machine."""
    if not is_public(key) or not (value is None or isinstance(value, bool | int | float | str | np.generic)):
        return False
    return as_plain_json(value) is not LEFT_OUT and not (isinstance(value, str) and SECRET.search(key))
