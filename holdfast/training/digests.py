"""Cheap digests of plain values, which show whether a value was changed."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.state import is_generator, is_sharded, read_generator
from holdfast.training.unregistered import LEAVES, SEQUENCES, has_state

# Limits: items of a container that are read one by one, and at all; containers in each other; bytes of a tensor or an
# array that are read, of a larger one so many elements. Training waits meanwhile: for 30 ms at most a container.
MAX_ITEMS = 256
MAX_LISTED = 100_000
DEEPEST = 4
MAX_BYTES = 2**22
SAMPLED = 4096

CONTAINERS = (dict, *SEQUENCES)
# Whether a checkpoint has a value: its changes don't count.
IsKnown = Callable[[Any], bool]


class Reader:
    """Makes digests of values. It remembers those of tensors, whose versions show whether they were changed."""

    def __init__(self) -> None:
        self._tensors: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def digest(self, value: Any, known: IsKnown, depth: int = 0) -> object:
        """Return what stands for a value; None for an object that is neither plain nor has a state."""
        if isinstance(value, Tensor):
            # A tensor with a graph is an output of this step: its backward pass can't run again in the next one.
            return None if value.grad_fn is not None else self._digest_tensor(value)
        if isinstance(value, np.ndarray):
            return _digest_array(value)
        if isinstance(value, CONTAINERS):
            return self._digest_items(value, known, depth)
        if isinstance(value, LEAVES):
            return type(value).__name__, repr(value) if isinstance(value, float | complex) else value
        if is_generator(value):
            return repr(read_generator(value))
        return self._digest_state(value, known, depth) if has_state(value) and depth < DEEPEST else None

    def _digest_items(self, value: Any, known: IsKnown, depth: int) -> object:
        items = list(value.items() if isinstance(value, dict) else value) if len(value) <= MAX_LISTED else []
        found: list[object] = [len(value)]
        if len(items) > MAX_ITEMS:
            found.append(hash(tuple(each if isinstance(each, int | float | str) else id(each) for each in items)))
        for each in items[:MAX_ITEMS] if depth < DEEPEST else ():
            pair = each if isinstance(value, dict) else ("", each)
            is_known = known(pair[1])
            name = pair[0] if isinstance(pair[0], str | int | float) else id(pair[0])
            found.append((name, is_known or self.digest(pair[1], known, depth + 1)))
        return hash(repr(sorted(map(repr, found)) if isinstance(value, set | frozenset) else found))

    def _digest_state(self, value: Any, known: IsKnown, depth: int) -> object:
        try:
            return self._digest_items(value.state_dict(), known, depth)
        except Exception:
            return None

    def _digest_tensor(self, value: Tensor) -> object:
        version = 0 if value.is_inference() else value._version
        digest = self._tensors.get(value)  # type: ignore[no-untyped-call]
        if digest is None or digest[0] != version or value.is_inference():
            digest = self._tensors[value] = version, _digest_array(_sample(value))
        return str(value.dtype), tuple(value.shape), digest


def _sample(value: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor's elements: of all, or of some if they are many. Empty if they can't be read."""
    if is_sharded(value) or value.layout is not torch.strided or value.is_meta or not value.is_contiguous():
        return np.zeros(0, np.uint8)
    flat = value.detach().view(-1)
    some = flat[:: max(1, len(flat) // SAMPLED)] if value.nbytes > MAX_BYTES else flat
    return some.resolve_conj().resolve_neg().contiguous().view(torch.uint8).cpu().numpy()


def _digest_array(value: np.ndarray[Any, Any]) -> object:
    if value.dtype == object:
        return value.shape, repr(value.reshape(-1)[:MAX_ITEMS])
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat[:SAMPLED]
    some = flat[:: max(1, flat.size // SAMPLED)] if flat.nbytes > MAX_BYTES else flat
    return str(value.dtype), value.shape, zlib.crc32(np.ascontiguousarray(some).tobytes())
