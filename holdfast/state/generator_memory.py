"""The memory of Python's and NumPy's global generators, read in a microsecond to see whether they have drawn.

Their own functions that return a state take 18 and 94 microseconds, because they make a Python object of each of 624
words. Nothing here writes to this memory. Python's layout, and the place of NumPy's cached normal number, aren't
documented: they are found on new generators, and checked on them. Where a check fails, nothing is read.
"""

import ctypes
import functools
import random
import struct
from typing import Any

import numpy as np

# A Mersenne Twister's state has 624 words of 4 bytes, and the number of words that it has used.
KEY_BYTES, STATE_BYTES = 2496, 2500
NUMPY_BITS = "MT19937"


# The bytes of a generator's state, and the normal number that the generator has cached beside them.
Memory = tuple[bytes, Any]


def to_numpy_state(memory: Memory) -> dict[str, Any]:
    """Return what `read_numpy` has returned in the form of ``np.random.get_state(legacy=False)``."""
    bits, normal = memory
    (position,) = struct.unpack("=i", bits[KEY_BYTES:])
    has_gauss, gauss = struct.unpack("=i4xd", normal)
    key = np.frombuffer(bits, dtype=np.uint32, count=KEY_BYTES // 4).copy()
    state = {"key": key, "pos": position}
    return {"bit_generator": NUMPY_BITS, "state": state, "has_gauss": has_gauss, "gauss": gauss}


def read_python() -> Memory | None:
    """Return a value that differs if the state of Python's global generator differs; None if it can't be read."""
    if (offset := _find_python()) is None:
        return None
    generator: Any = random._inst
    return ctypes.string_at(id(generator) + offset, STATE_BYTES), generator.gauss_next


def read_numpy() -> Memory | None:
    """Return a value that differs if the state of NumPy's global generator differs; None if it can't be read."""
    if (offset := _find_numpy()) is None:
        return None
    generator: Any = np.random.mtrand._rand
    bits = generator._bit_generator
    if type(bits) is not np.random.MT19937:
        return None
    return ctypes.string_at(bits.ctypes.state_address, STATE_BYTES), ctypes.string_at(id(generator) + offset, 16)


@functools.cache
def _find_python() -> int | None:
    """Return where the state is in the memory of a ``random.Random``; None if that isn't certain."""
    probe = random.Random(1)
    offsets = []
    for draws in (0, 1, 700):
        for _ in range(draws):
            probe.random()
        *words, position = probe.getstate()[1]
        state = struct.pack("=i624I", position, *words)
        offsets.append(ctypes.string_at(id(probe), probe.__sizeof__()).find(state))
    return offsets[0] if offsets[0] >= 0 and len({*offsets}) == 1 else None


@functools.cache
def _find_numpy() -> int | None:
    """Return where the cached normal number is in the memory of a ``RandomState``; None if that isn't certain."""
    probe: Any = np.random.RandomState(1)
    offsets: list[int] = []
    for _ in range(4):
        probe.standard_normal()
        state = probe.get_state(legacy=False)
        memory = ctypes.string_at(id(probe), probe.__sizeof__())
        if state["has_gauss"]:  # without a cached number the number is 0.0, as many words of the memory are
            offsets.append(memory.find(struct.pack("=d", state["gauss"])) - 8)
        place = offsets[-1] if offsets else -1
        bits = ctypes.string_at(probe._bit_generator.ctypes.state_address, STATE_BYTES)
        if place < 0 or not _is_equal(to_numpy_state((bits, memory[place : place + 16])), state):
            return None
    return offsets[0] if len({*offsets}) == 1 else None


def _is_equal(read: dict[str, Any], state: dict[str, Any]) -> bool:
    own, other = read.pop("state"), state["state"]
    is_equal = own["pos"] == other["pos"] and np.array_equal(own["key"], other["key"])
    return is_equal and all(each == state[name] for name, each in read.items())
