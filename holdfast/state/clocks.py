"""The readings of clocks among a program's values. They differ in each process, and a resume has no use for them."""

import dis
import functools
import gc
import os
import re
import time
import types
from typing import Any

import numpy as np

from holdfast.machine.processes import read_age
from holdfast.state.written_times import READS, find_written_times

# The clocks that `is_reading` knows. Programs store the times of these clocks, to measure durations.
CLOCKS = (time.time, time.perf_counter, time.monotonic)
NANOSECONDS = 10**9
# The names of attributes that may hold times and durations.
OF_TIMES = re.compile(r"(?i)(.*_)?(time|times|timer|elapsed|duration|durations|seconds|clock|began|started)(_.*)?$")


def is_reading(value: Any) -> bool:
    """Return whether a number is a time that a clock has shown since this process began, in seconds or nanoseconds.

    Such a number always differs between two processes, and a resume has no use for it. A clock's time in seconds has
    nine decimals. A float from a tensor or a computation usually has more decimals, and a number in source code fewer.
    """
    if type(value) is int and value > NANOSECONDS:
        value /= NANOSECONDS
    if not isinstance(value, float) or round(value, 3) == value or round(value, 9) != value:
        return False
    if float(np.float32(value)) == value:
        return False
    age_s = CLOCKS[0]() - _read_start() + 1
    return any(now - age_s <= value <= now for now in (clock() for clock in CLOCKS))


@functools.cache
def _read_start() -> float:
    """Return the time at which this process began, in the seconds of ``time.time``."""
    return CLOCKS[0]() - read_age(os.getpid())


def list_measured(attributes: dict[str, Any], owner: Any = None) -> set[str]:
    """Return the names of the attributes that hold readings of a clock, or durations that are computed from such
    readings.

    An attribute counts if it is a reading now. An attribute whose name contains a word for time also counts in two
    cases: only code that reads a clock uses the attribute, or code assigns differences of clock readings to it. So
    ``time_queue`` of gymnasium's ``RecordEpisodeStatistics`` counts, and the time of a simulation doesn't.

    Args:
        attributes: an object's ``__dict__``, or any other dict.
        owner: the object; searched by its ``__dict__`` if None.
    """
    found = {name for name, value in attributes.items() if is_reading(value)}
    named = {name for name in attributes if isinstance(name, str) and OF_TIMES.match(name)} - found
    if not named:
        return found
    owner = find_holder_of(attributes) if owner is None else owner
    codes = [code for kind in type(owner).__mro__ for code in _list_codes(kind)] if owner is not None else []
    written = find_written_times([type(owner)]).attributes if owner is not None else set()
    for name in named:
        used = [code for code in codes if name in _list_names(code)[1] and code.co_name != "__init__"]
        found |= {name} if name in written or (used and all(map(_reads_clock, used))) else set()
    return found


def find_holder_of(attributes: dict[str, Any]) -> Any:
    """Return the object whose ``__dict__`` this is; None if there is none."""
    found = [each for each in gc.get_referrers(attributes) if getattr(each, "__dict__", None) is attributes]
    return next((each for each in found if not type(each).__module__.startswith("holdfast.state")), None)


@functools.cache
def _list_codes(kind: type) -> list[types.CodeType]:
    return [each.__code__ for each in vars(kind).values() if isinstance(each, types.FunctionType)]


def _reads_clock(code: types.CodeType) -> bool:
    names, attributes = _list_names(code)
    # `self.time` is an attribute of the user's, while the global `time` is the module or its function
    return not READS.isdisjoint(names) or not (READS - {"time"}).isdisjoint(attributes)


@functools.cache
def _list_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the globals and of the attributes that a function uses."""
    found = [(each.opname, str(each.argval)) for each in dis.get_instructions(code)]
    attributes = {name for operation, name in found if operation.endswith(("_ATTR", "_METHOD"))}
    return frozenset(name for operation, name in found if operation == "LOAD_GLOBAL"), frozenset(attributes)
