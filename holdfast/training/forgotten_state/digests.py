"""Digests of plain values: equal values have equal digests in all processes."""

import contextlib
import enum
import functools
import hashlib
import queue
import re
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.state import is_generator, is_reading, is_recorder, is_sharded, read_generator
from holdfast.state.tensors import is_freed

# The limits of a digest: the items of a container, the depth of nested containers, and the bytes of a tensor or an
# array. If a tensor or an array is larger, only about SAMPLED of its elements are read.
MAX_ITEMS = 512
DEEPEST = 8
MAX_BYTES = 2**24
SAMPLED = 4096

SCALARS = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, torch.dtype, enum.Enum)
SEQUENCES = (list, tuple, set, frozenset, deque)
CONTAINERS = (dict, *SEQUENCES)
CACHES = type(functools.lru_cache(lambda: None))
# The modules of iterators whose `__reduce__` returns the position without moving the iterator.
ITERATORS = ("builtins", "itertools")
# Names that programs give to objects and values that only record a training.
OF_LOGS = re.compile(
    r"(?i)(.*_)?(log|logs|logger|history|meters?|metrics?|writer|progress|profiler|timer|times?|timings?|elapsed)$"
)
LOG_CLASSES = re.compile(r".*(Log|Logger|Meter|Metrics?|Writer|Timer|Stopwatch|History|ProgressBar|Profiler)$")
IsKnown = Callable[[Any], bool]


def has_digest(value: Any) -> bool:
    """Return whether `digest` covers a value; False for functions, modules and other objects with attributes."""
    return (
        isinstance(value, (*SCALARS, Tensor, np.ndarray, *CONTAINERS, queue.Queue, types.GeneratorType, CACHES))
        or is_iterator(value)
        or is_generator(value)
    )


def is_iterator(value: Any) -> bool:
    """Return whether a value is a built-in iterator, such as ``enumerate`` or ``itertools.count``."""
    return type(value).__module__ in ITERATORS and hasattr(type(value), "__next__") and not _is_generator(value)


def _is_generator(value: Any) -> bool:
    return isinstance(value, types.GeneratorType)


def reduce_iterator(value: Any) -> tuple[Any, ...]:
    """Return the parts of a built-in iterator: its position, and the iterators from which it reads."""
    with warnings.catch_warnings(), contextlib.suppress(TypeError):
        warnings.simplefilter("ignore", DeprecationWarning)
        found = value.__reduce__()
        return tuple(found[1:]) if isinstance(found, tuple) else ()
    return ()


def is_logger(name: str, value: Any) -> bool:
    """Return whether a value probably only records a training, by its class, its package and its name."""
    kind = type(value)
    is_known = is_recorder(value) or kind.__module__.partition(".")[0] == "torchmetrics"
    return is_known or LOG_CLASSES.match(kind.__name__) is not None or OF_LOGS.match(name) is not None


def digest(value: Any, is_known: IsKnown = lambda _: False) -> str:
    """Return the SHA-256 of a plain value; empty if the value can't be read, or isn't state.

    Two kinds of values aren't state: a tensor with an autograd graph, because the present step has computed it, and a
    time that a clock has shown (`is_reading`).

    Args:
        is_known: returns whether a checkpoint contains a value. Inside a container, such values are skipped.
    """
    if is_reading(value) or (isinstance(value, Tensor) and value.grad_fn is not None):
        return ""
    sha256 = hashlib.sha256()
    try:
        for part in _spell(value, is_known, 0):
            sha256.update(part)
    except Exception:  # the user's own methods may raise any error
        return ""
    return sha256.hexdigest()


def _spell(value: Any, is_known: IsKnown, depth: int) -> Iterator[bytes]:
    """Yield the bytes for a value's digest: its class's name, and its contents unless a checkpoint contains them."""
    yield f"{type(value).__qualname__}:".encode()
    if depth and not isinstance(value, SCALARS) and is_known(value):
        return
    if isinstance(value, Tensor | np.ndarray):
        yield from _spell_array(value)
    elif isinstance(value, SCALARS):
        yield b"" if is_reading(value) else repr(value).encode(errors="backslashreplace")
    elif is_generator(value):
        yield from _spell(read_generator(value), is_known, depth + 1)
    elif isinstance(value, CACHES):
        yield repr(value.cache_info()).encode()
    elif depth < DEEPEST:
        yield from _spell_items(value, is_known, depth + 1)


def _spell_items(value: Any, is_known: IsKnown, depth: int) -> Iterator[bytes]:
    items: Any = ()
    if isinstance(value, Mapping):
        items = _cut(value.items())
        yield str(len(value)).encode()
    elif isinstance(value, set | frozenset):
        yield from sorted(b"".join(_spell(each, is_known, depth)) for each in value)
    elif isinstance(value, SEQUENCES):
        items = _cut(value)
        yield str(len(value)).encode()
    elif isinstance(value, queue.Queue):
        items = [_cut(value.queue), value.qsize()]
    elif _is_generator(value):
        frame = value.gi_frame
        items = [frame.f_lasti, dict(frame.f_locals)] if frame else ["over"]
    elif is_iterator(value):
        items = reduce_iterator(value)
    for each in items:
        yield from _spell(each, is_known, depth)


def _cut(items: Any) -> list[Any]:
    """Return the items of a container; if it has more than `MAX_ITEMS`, only the first and the last `MAX_ITEMS` / 2."""
    found = list(items)
    return found if len(found) <= MAX_ITEMS else found[: MAX_ITEMS // 2] + found[-MAX_ITEMS // 2 :]


def _spell_array(value: Any) -> Iterator[bytes]:
    yield f"{value.dtype}{tuple(value.shape)}".encode()
    if isinstance(value, Tensor):
        value = value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]
        if value.is_meta or value.layout is not torch.strided or is_freed(value):
            return
        flat = value.detach().reshape(-1) if value.is_contiguous() else value.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLED)] if value.nbytes > MAX_BYTES else flat
        yield some.resolve_conj().resolve_neg().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    elif value.dtype == object:
        yield repr(value.reshape(-1)[:MAX_ITEMS]).encode()
    else:
        some_items = value.flat[:: max(1, value.size // SAMPLED)] if value.nbytes > MAX_BYTES else value
        yield np.ascontiguousarray(some_items).tobytes()
