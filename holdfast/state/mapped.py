"""The detection of memory into which a restore must not write: a mapped file, or read-only memory."""

import bisect
import mmap
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

# Linux's list of a process's memory areas. A line has the addresses and the permissions, of which the last is "s" if
# the memory is shared. For a mapped file it also has the offset, the device, the inode number and the path.
MAPS = Path("/proc/self/maps")
LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .(.).(.) [0-9a-f]+ \S+ (\d+)\s*(.*)")
# Paths that begin with one of these aren't a user's data files, but shared memory or the memory of devices.
NO_FILES = ("/dev/", "/memfd:", "/SYSV", "anon_inode:")


class _Area(NamedTuple):
    start: int
    stop: int
    is_writable: bool
    is_of_a_file: bool


def is_foreign(value: Any) -> bool:
    """Return whether a tensor or an array is in memory that is read-only or mapped from a file.

    A tensor's memory is looked up in Linux's list of memory areas. On other systems only arrays can be checked.
    """
    if isinstance(value, np.ndarray):
        return not value.flags.writeable or _is_of_a_shared_file(value) or _is_in_foreign_area(_address_of(value))
    return isinstance(value, Tensor) and value.is_cpu and _is_in_foreign_area(value.data_ptr())


def _address_of(value: np.ndarray[Any, Any]) -> int:
    address: int = value.__array_interface__["data"][0]
    return address


def _is_of_a_shared_file(value: Any) -> bool:
    base = value
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap):
            return base.mode != "c"
        base = base.base
    return False


def _is_in_foreign_area(address: int) -> bool:
    areas = _list_areas()
    number = bisect.bisect(areas, address, key=lambda each: each.start) - 1
    if number < 0 or address >= areas[number].stop:
        return False
    return areas[number].is_of_a_file or not areas[number].is_writable


def _list_areas() -> list[_Area]:
    """Return the areas of this process's memory, sorted by address; empty on systems without such a list."""
    try:
        lines = MAPS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for match in filter(None, map(LINE.fullmatch, lines)):
        start, stop, writable, shared, inode, path = match.groups()
        is_file = shared == "s" and inode != "0" and not path.startswith(NO_FILES)
        found.append(_Area(int(start, 16), int(stop, 16), writable == "w", is_file))
    return found
