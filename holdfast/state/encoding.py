"""The encoding of a state as tensors and one JSON value, exact and without pickle.

A state is a tree. Its tensors go into the payload under their dotted names. Everything else becomes one JSON value, in
which {"$tensor": name} stands for a tensor, and similar marks for values that JSON can't hold exactly.
"""

import base64
import enum
import functools
import math
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from holdfast.canonical import mark_exactly, mark_int, read_exactly
from holdfast.checkpoint import (
    HEADER_METADATA,
    Payload,
    Tensor,
    copy_pieces,
    count_cores,
    in_memory,
)
from holdfast.errors import StateError
from holdfast.memory import ALIGNED_BYTES, map_memory
from holdfast.state.sharded import ShardedBytes, check_is_cut, is_sharded, place_of
from holdfast.state.tensors import TensorBytes

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KEY_TYPES = (str, int, float, bool, type(None))
# The part of a state in which the order of a mapping's items counts: a loop may go through them, or draw one by its
# place. torch's own states are the same in any order.
ORDERED = "extras"
# The kinds of NumPy's numbers that are saved with their type: booleans, whole numbers, floats of up to 8 bytes.
NUMBER_KINDS = "biuf"
# The kinds of NumPy's arrays that torch can view: those and complex numbers.
ARRAY_KINDS = "biufc"

# By place: the names of the tensors in the payload. The tensors stay alive, so that no place is used again.
_Seen = dict[tuple[Any, ...], tuple[torch.Tensor, str]]


def to_payload(state: Any) -> Payload:
    """Encode a state as tensors and one JSON value. Tied tensors, which share their memory, are stored once.

    Raises:
        StateError: a value can't be saved without pickle; the message has its dotted name.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors, {})
    return Payload(tensors, tree)


def from_payload(payload: Payload, lent: Collection[str] = ()) -> Any:
    """Decode a payload into the state that `to_payload` encoded. Each tensor gets new memory, aligned as torch's.

    Args:
        lent: top-level keys of the state whose tensors may be views of the payload's memory. Use it only if the
            caller copies them. New memory costs more time than reading the bytes.
    """
    tensors = payload.tensors
    own: dict[str, torch.Tensor] = {}

    def new(name: str) -> torch.Tensor:
        piece = next(iter(tensors[name].pieces), None)
        if isinstance(piece, ShardedBytes):
            whole: torch.Tensor = piece.tensor
            return whole
        if name not in own:
            own[name] = _new(tensors[name])
        return own[name]

    def lend(name: str) -> torch.Tensor:
        dtype, shape, (piece, *others) = tensors[name]
        if others or not len(piece) or isinstance(piece, ShardedBytes):
            return new(name)
        return torch.frombuffer(in_memory(piece), dtype=DTYPES[dtype]).view(shape)

    if lent:
        state = {name: _decode(value, lend if name in lent else new) for name, value in payload.tree.items()}
    else:
        state = _decode(payload.tree, new)
    with ThreadPoolExecutor(count_cores()) as pool:
        filling = []
        for name, copy in own.items():
            if copy.nbytes >= ALIGNED_BYTES:  # first touching new memory is slow, so several threads do it
                filling.append(pool.submit(_fill, copy, tensors[name]))
            else:  # handing a small copy to a thread costs more than the copy
                _fill(copy, tensors[name])
        for each in filling:
            each.result()
    return state


def _encode(value: Any, name: str, tensors: dict[str, Tensor], seen: _Seen) -> Any:
    if isinstance(value, torch.Tensor):
        return {"$tensor": _add_tensor(value, name, tensors, seen)}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in ARRAY_KINDS:
            raise StateError(
                f"{name or 'the state'} is an array of {value.dtype}, which can't be saved without a pickle",
                hint="use an array of numbers, or a list: value.tolist()",
            )
        return {"$array": _add_tensor(torch.from_numpy(np.ascontiguousarray(value)), name, tensors, seen)}
    if isinstance(value, np.generic):
        # A plain float in place of a float32 would have other sums.
        if value.dtype.kind in NUMBER_KINDS and value.dtype.itemsize <= 8:
            return {"$number": [value.dtype.name, _encode(value.item(), name, tensors, seen)]}
        value = value.item()
    if isinstance(value, enum.Enum) and not _is_plain(value.value):
        raise _no_form(value, name)
    if isinstance(value, enum.Enum):
        return {"$enum": [*_path_of(type(value), name), _encode(value.value, name, tensors, seen)]}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return mark_int(value)
    if isinstance(value, float):
        return mark_exactly(value)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        prefix = f"{name}." if name else ""
        items = [_encode(item, f"{prefix}{index}", tensors, seen) for index, item in enumerate(value)]
        if _is_named(type(value)):
            return {"$named": [*_path_of(type(value), name), items]}
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, name, tensors, seen)
    raise _no_form(value, name)


def _no_form(value: Any, name: str) -> StateError:
    return StateError(
        f"{name or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, "
        "which can't be saved without a pickle",
        hint="a state_dict may hold tensors, arrays, numbers, strings, bytes, lists, tuples and dicts",
    )


def _is_plain(value: Any) -> bool:
    return type(value) in (*KEY_TYPES, bytes)


def _is_named(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def _is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def _path_of(kind: type, name: str) -> tuple[str, str]:
    """Return the module and the qualified name by which `_find_class` finds a class.

    Raises:
        StateError: the class has none, because a function has made it.
    """
    path = kind.__module__, kind.__qualname__
    if _look_up(*path) is not kind:
        raise StateError(
            f"{name or 'the state'} is a {kind.__qualname__}, a class that can't be found by its name on resume",
            hint="define the class at the top of a module, or save a plain tuple or value",
        )
    return path


def _look_up(module: str, name: str) -> Any:
    """Return an object of a module that is imported already, by its qualified name; None if there is none."""
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), sys.modules.get(module))


def _find_class(module: str, name: str, is_right: Callable[[type], bool]) -> Any:
    """Return a class that the recipe has imported. Nothing is imported for a saved state.

    Raises:
        StateError: there is no such class.
    """
    found = _look_up(module, name)
    if not isinstance(found, type) or not is_right(found):
        raise StateError(f"the saved state has a {name} of the module {module}, which the recipe doesn't have now")
    return found


def _encode_dict(value: dict[Any, Any], name: str, tensors: dict[str, Tensor], seen: _Seen) -> Any:
    kinds = set(map(type, value))
    for kind in kinds:
        if not issubclass(kind, KEY_TYPES):
            raise StateError(
                f"{name} has a key of type {kind.__qualname__}; keys may be strings and numbers",
                hint='use a string in its place, such as "3/7" for (3, 7), or a list of pairs',
            )
    prefix = f"{name}." if name else ""
    # Sorted, so that nothing depends on the order of a dict, for example which name a tied tensor gets.
    keys = sorted(value) if kinds == {str} else sorted(value, key=lambda key: (type(key).__name__, str(key)))
    items = {key: _encode(value[key], f"{prefix}{key}", tensors, seen) for key in keys}
    is_sorted = True
    if name.partition(".")[0] == ORDERED and not _is_of_a_module(value):
        # Canonical JSON sorts beyond ASCII in another order than Python.
        is_sorted = [*value] == keys and all(str(key).isascii() for key in keys)
        items = {key: items[key] for key in value}
    if is_sorted and all(issubclass(kind, str) for kind in kinds) and not any(key.startswith("$") for key in keys):
        return items
    return {"$dict": [[_encode(key, name, tensors, seen), item] for key, item in items.items()]}


def _is_of_a_module(value: dict[Any, Any]) -> bool:
    """Return whether a mapping is the ``state_dict`` of a torch module."""
    return hasattr(value, "_metadata")


def _add_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, Tensor], seen: _Seen) -> str:
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"{tensor.layout} tensor of {tensor.dtype}{' without data' if tensor.is_meta else ''}"
        raise StateError(
            f"{name} is a {kind}, which safetensors can't hold",
            hint="save a dense tensor in its place: to_dense(), torch.view_as_real(), dequantize(); or, if it never "
            "changes, build it anew: register_buffer(..., persistent=False)",
        )
    if is_sharded(tensor):
        check_is_cut(tensor, name)
    place = place_of(tensor)
    if place in seen:
        return seen[place][1]
    while name in tensors or name == HEADER_METADATA:  # {"a.b": x} beside {"a": {"b": y}}
        name += "'"
    view = ShardedBytes if is_sharded(tensor) else TensorBytes
    data = view(tensor) if tensor.numel() else b""
    tensors[name] = Tensor(dtype, tuple(tensor.shape), (data,))
    if data and place[0]:  # empty tensors may share an address without being tied
        seen[place] = (tensor, name)
    return name


def _decode(value: Any, take: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        mark, inner = next(iter(value.items()))
        if mark == "$tensor":  # tied tensors have one name, so they share their memory again
            return take(inner)
        if mark == "$array":
            return take(inner).numpy()
        if mark == "$tuple":
            return tuple(_decode(item, take) for item in inner)
        if mark == "$dict":
            return {_decode(key, take): _decode(item, take) for key, item in inner}
        if mark == "$int":
            return int(inner)
        if mark == "$float":
            return read_exactly(value)
        if mark == "$bytes":
            return base64.b64decode(inner)
        if mark == "$number":
            return np.dtype(inner[0]).type(_decode(inner[1], take))
        if mark == "$enum":
            return _find_class(inner[0], inner[1], _is_enum)(_decode(inner[2], take))
        if mark == "$named":
            return _find_class(inner[0], inner[1], _is_named)._make(_decode(item, take) for item in inner[2])
    return {key: _decode(item, take) for key, item in value.items()}


def _new(tensor: Tensor) -> torch.Tensor:
    """Allocate memory for a tensor; for a large one in huge pages, since each new page costs microseconds."""
    dtype = DTYPES[tensor.dtype]
    if tensor.size_bytes < ALIGNED_BYTES:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(map_memory(tensor.size_bytes), dtype=dtype, count=math.prod(tensor.shape)).view(
        tensor.shape
    )


def _fill(copy: torch.Tensor, tensor: Tensor) -> None:
    copy_pieces(tensor.pieces, copy.view(-1).view(torch.uint8).numpy().data)
