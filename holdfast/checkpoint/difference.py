"""The comparison of two states: the names of the values and tensors that differ."""

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from holdfast.checkpoint.payload import Payload, Piece, Tensor, in_memory

# NumPy's intermediate result for a block of this size fits into a processor's cache.
COMPARED_BYTES = 2**18


def differences(a: Payload, b: Payload) -> list[str]:
    """Return the dotted names of all values and tensors that differ, sorted.

    The first part of a name is the component, for example ``model`` or ``optimizer``.
    """
    return sorted(_find_differences(a.tree, b.tree, "", a, b))


def shorten(names: list[str], shown: int) -> str:
    """Return the first ``shown`` names, joined with commas, and the number of the remaining names."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _find_differences(x: Any, y: Any, name: str, a: Payload, b: Payload) -> list[str]:
    if _mark_of(x) != _mark_of(y):
        x, y = _as_earlier(x, y), _as_earlier(y, x)
    if isinstance(x, dict) and isinstance(y, dict) and x.keys() == y.keys():
        if len(x) == 1 and (mark := next(iter(x))).startswith("$"):
            return _find_marked_differences(mark, x[mark], y[mark], name, a, b)
        return [found for key in x for found in _find_differences(x[key], y[key], _join(name, key), a, b)]
    if isinstance(x, dict) and isinstance(y, dict) and not _is_marked(x) and not _is_marked(y):
        lacking = [_join(name, key) for key in x.keys() ^ y.keys()]
        return lacking + [
            found for key in x.keys() & y.keys() for found in _find_differences(x[key], y[key], _join(name, key), a, b)
        ]
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        return [
            found
            for index, (left, right) in enumerate(zip(x, y, strict=True))
            for found in _find_differences(left, right, _join(name, index), a, b)
        ]
    return [] if x == y and type(x) is type(y) else [name or "(everything)"]


def _mark_of(value: Any) -> str:
    """Return the mark of an encoded value, a key such as "$as"; empty for a value without a mark."""
    return next(iter(value)) if isinstance(value, dict) and _is_marked(value) else ""


def _as_earlier(value: Any, other: Any) -> Any:
    """Return ``value`` in the form of versions before 0.2, if the other value may come from such a version.

    Versions before 0.2 didn't save the order of a mapping, NumPy's types, and the classes of enums, named tuples and
    derived values.
    """
    mark = _mark_of(value)
    if mark == "$dict" and isinstance(other, dict) and not _mark_of(other):
        return {str(key): each for key, each in value[mark]}
    if mark == "$named" and _mark_of(other) == "$tuple":
        return {"$tuple": value[mark][-1]}
    if mark in ("$number", "$enum") and _mark_of(other) not in ("$number", "$enum"):
        return value[mark][-1]
    if mark == "$typed":
        plain = value[mark][-1]
        plain = plain[-1] if value[mark][:2] == ["collections", "defaultdict"] else plain
        return plain if _mark_of(plain) == _mark_of(other) else _as_earlier(plain, other)
    return value


def _find_marked_differences(mark: str, x: Any, y: Any, name: str, a: Payload, b: Payload) -> list[str]:
    if mark in ("$tensor", "$array"):
        one, other = a.tensors[x], b.tensors[y]
        # Compare the names, too: tied tensors share one name, so a different name means that different tensors are
        # tied.
        is_same = x == y and (one.dtype, one.shape) == (other.dtype, other.shape) and _has_same_bytes(one, other)
        return [] if is_same else [name]
    if mark == "$dict":
        # Keys may be numbers. Compare them as JSON texts, so that the keys 1 and "1" stay distinct.
        left, right = ({json.dumps(key): value for key, value in each} for each in (x, y))
        shown = {key: str(json.loads(key)) for key in left.keys() | right.keys()}
        lacking = [_join(name, shown[key]) for key in left.keys() ^ right.keys()]
        both = left.keys() & right.keys()
        if not lacking and list(left) != list(right):
            return [name]  # only the order of the items differs
        return lacking + [
            found for key in both for found in _find_differences(left[key], right[key], _join(name, shown[key]), a, b)
        ]
    if mark == "$as":  # x[1] and y[1] are the layouts in memory and the classes of arrays
        return _find_differences(x[0], y[0], name, a, b) or ([] if x[1] == y[1] else [name])
    if mark == "$tuple":
        return _find_differences(x, y, name, a, b)
    return [] if x == y else [name]


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    # NumPy compares four times as fast as memoryviews. It is imported here, so that other commands start faster.
    import numpy as np

    return all(
        np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8))
        for left, right in _align(one.pieces, other.pieces)
    )


def _align(ones: tuple[Piece, ...], others: tuple[Piece, ...]) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield blocks of at most COMPARED_BYTES from the same positions of two tensors of equal size.

    The two tensors may be cut into pieces at different places.
    """
    left, right = (deque(memoryview(in_memory(piece)) for piece in pieces if len(piece)) for pieces in (ones, others))
    while left and right:
        one, other = left.popleft(), right.popleft()
        size = min(len(one), len(other), COMPARED_BYTES)
        yield one[:size], other[:size]
        left.extendleft([one[size:]] if len(one) > size else [])
        right.extendleft([other[size:]] if len(other) > size else [])


def _is_marked(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
