"""The encoding of a state as tensors and one JSON value, exact and without pickle.

A state is a tree. Its tensors go into the payload under their dotted names. Everything else becomes one JSON value. In
this JSON value, the mark {"$tensor": name} replaces a tensor, and similar marks replace values that JSON can't hold
exactly.
"""

import base64
import enum
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint import HEADER_METADATA, Payload, Tensor
from holdfast.errors import StateError
from holdfast.provenance.canonical import mark_exactly, mark_int
from holdfast.state.classes import PLAIN, as_plain, is_named, name_number, path_of
from holdfast.state.layout import Extent, add_options, check_gaps, find_extent, lies_by_rows, share
from holdfast.state.tensor_forms import bytes_of, find_form, place_of
from holdfast.state.tensors import TensorBytes, is_freed

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
PAIRS = "F4"  # 4-bit floats: torch packs two numbers into an element, but safetensors counts each number
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMPY_NAMES = {
    np.dtype(name): dtype
    for name, dtype in {
        "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16", "uint32": "U32",
        "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
    }.items()
}  # fmt: skip
KEY_TYPES = (str, int, float, bool, type(None))
ARRAY_TYPES = (torch.Tensor, np.ndarray)
# The top-level keys of a state that contain values of the user's code; see `_Exact`.
EXTRAS, OPTIMIZER = "extras", "optimizer"
# The subclasses of NumPy's array that can be saved, each with the name that is saved.
ARRAYS: dict[type, str] = {np.matrix: "matrix", np.memmap: "memmap"}


class _Exact:
    """A value that is saved with the order of its dicts, the classes of its plain values, and its shared memory.

    A loop may iterate over a dict's items, or choose an item by its position. In torch's own states the order and the
    classes have no meaning.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Seen:
    """The values that were encoded so far.

    Attributes:
        is_exact: whether the present value is inside an `_Exact`.
        places: for each place in memory, the value at this place, and the name of the value's tensor in the payload.
            The value is kept alive here, so that no other value gets the same place.
        extents: the ranges of memory of the values inside an `_Exact`; they may overlap.
    """

    def __init__(self) -> None:
        self.is_exact = False
        self.places: dict[tuple[Any, ...], tuple[Any, str]] = {}
        self.extents: list[Extent] = []


def to_payload(state: Any) -> Payload:
    """Encode a state as tensors and one JSON value. Tied tensors, which share their memory, are stored once.

    Raises:
        StateError: a value can't be saved without pickle; the message has its dotted name.
    """
    tensors: dict[str, Tensor] = {}
    seen = _Seen()
    tree = _encode(_mark_exact(state), "", tensors, seen)
    share(seen.extents)
    return Payload(tensors, tree)


def _mark_exact(state: Any) -> Any:
    """Return a state in which the extras, and the containers in an optimizer's state, are inside an `_Exact`."""
    if not isinstance(state, dict):
        return state
    marked: dict[str, Any] = {EXTRAS: _Exact(state[EXTRAS])} if EXTRAS in state else {}
    optimizer = state.get(OPTIMIZER)
    if isinstance(optimizer, dict) and isinstance(optimizer.get("state"), dict):
        members = {each for group in optimizer.get("param_groups", ()) for each in group.get("params", ())}
        found = {key: _mark_inner(each, key in members) for key, each in optimizer["state"].items()}
        marked[OPTIMIZER] = optimizer | {"state": found}
    return state | marked


def _mark_inner(values: Any, is_of_parameter: bool) -> Any:
    """Return an optimizer's state of one parameter with marked values, or a marked value that has another key."""
    if type(values) is dict and is_of_parameter:
        return {key: each if isinstance(each, ARRAY_TYPES) else _Exact(each) for key, each in values.items()}
    return values if isinstance(values, ARRAY_TYPES) else _Exact(values)


def _encode(value: Any, name: str, tensors: dict[str, Tensor], seen: _Seen) -> Any:
    if type(value) is _Exact:
        seen.is_exact = True
        found = _encode(value.value, name, tensors, seen)
        seen.is_exact = False
        return found
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, name, tensors, seen)
    if isinstance(value, np.ndarray):
        return _encode_array(value, name, tensors, seen)
    if isinstance(value, np.generic):
        # Save the type: sums with a plain float round differently from sums with a float32.
        kind = name_number(value)
        if kind is None:
            raise _no_form(value, name)
        return {"$number": [kind, _encode(value.item(), name, tensors, seen)]}
    if isinstance(value, enum.Enum) and not _is_plain(value.value):
        raise _no_form(value, name)
    if isinstance(value, enum.Enum):
        return {"$enum": [*path_of(type(value), name), _encode(value.value, name, tensors, seen)]}
    if value is None or type(value) is bool:
        return value
    if seen.is_exact and _is_derived(value):
        return {"$typed": [*path_of(type(value), name), _encode(as_plain(value, name), name, tensors, seen)]}
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return mark_int(value)
    if isinstance(value, float):
        return mark_exactly(value)
    if isinstance(value, complex):
        return {"$complex": [mark_exactly(value.real), mark_exactly(value.imag)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        prefix = f"{name}." if name else ""
        items = [_encode(item, f"{prefix}{index}", tensors, seen) for index, item in enumerate(value)]
        if is_named(type(value)):
            return {"$named": [*path_of(type(value), name), items]}
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, name, tensors, seen)
    raise _no_form(value, name)


def _is_derived(value: Any) -> bool:
    """Return whether a value's class derives from a plain class and has no special encoding."""
    kind = type(value)
    return kind not in PLAIN and issubclass(kind, PLAIN) and not is_named(kind) and not _is_of_a_module(value)


def _no_form(value: Any, name: str) -> StateError:
    return StateError(
        f"{name or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which could be saved only "
        "as a pickle, and checkpoints contain no pickles",
        hint="a state_dict may hold tensors, arrays, numbers, strings, bytes, lists, tuples and dicts",
    )


def _is_plain(value: Any) -> bool:
    return type(value) in (*KEY_TYPES, bytes)


def _encode_dict(value: dict[Any, Any], name: str, tensors: dict[str, Tensor], seen: _Seen) -> Any:
    kinds = set(map(type, value))
    for kind in kinds:
        if not issubclass(kind, KEY_TYPES):
            raise StateError(
                f"the saved dict {name} has a key of type {kind.__qualname__}; only strings and numbers are allowed "
                "as keys",
                hint='use a string in its place, such as "3/7" for (3, 7), or a list of pairs',
            )
    prefix = f"{name}." if name else ""
    # Sort the keys, because the encoding mustn't depend on a dict's order: a tied tensor is named by its first key.
    keys = sorted(value) if kinds == {str} else sorted(value, key=lambda key: (type(key).__name__, str(key)))
    items = {key: _encode(value[key], f"{prefix}{key}", tensors, seen) for key in keys}
    is_sorted = True
    if seen.is_exact and not _is_of_a_module(value):
        # Keys that aren't ASCII count as unsorted, because canonical JSON and Python sort their characters differently.
        is_sorted = [*value] == keys and all(str(key).isascii() for key in keys)
        items = {key: items[key] for key in value}
    are_texts = kinds <= {str} if seen.is_exact else all(issubclass(kind, str) for kind in kinds)
    whole: dict[str, Any] = items
    if not is_sorted or not are_texts or any(key.startswith("$") for key in keys):
        whole = {"$dict": [[_encode(key, name, tensors, seen), item] for key, item in items.items()]}
    if seen.is_exact and (attributes := _attributes_of(value)):
        return {"$attributes": [whole, _encode(attributes, name, tensors, seen)]}
    return whole


def _is_of_a_module(value: dict[Any, Any]) -> bool:
    """Return whether a mapping is the ``state_dict`` of a torch module."""
    return hasattr(value, "_metadata")


def _attributes_of(value: dict[Any, Any]) -> dict[str, Any]:
    """Return the attributes of an ``OrderedDict``, such as the ``_metadata`` of a module's ``state_dict``.

    The ``_metadata`` of a torch module contains the versions of its submodules' states; that of a tensordict contains
    shapes. Versions are left out if all are 1, the usual case. Devices become None, because a tensor's device isn't
    part of the state.
    """
    attributes = dict(vars(value)) if isinstance(value, OrderedDict) else {}
    parts = attributes.get("_metadata")
    if isinstance(parts, dict) and all(isinstance(each, dict) for each in parts.values()):
        kept = {
            part: {name: None if isinstance(each, torch.device) else each for name, each in described.items()}
            for part, described in parts.items()
        }
        attributes["_metadata"] = OrderedDict(kept)
        if all(each == {"version": 1} for each in kept.values()):
            del attributes["_metadata"]
    return attributes


def _encode_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, Tensor], seen: _Seen) -> dict[str, Any]:
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"{tensor.layout} tensor of {tensor.dtype}{' without data' if tensor.is_meta else ''}"
        raise StateError(
            f"{name} is a {kind}, which safetensors can't hold",
            hint="save a dense tensor in its place: to_dense(), torch.view_as_real(), dequantize(); or, if it never "
            "changes, build it anew: register_buffer(..., persistent=False)",
        )
    if (form := find_form(tensor)) is not None:
        form.check(tensor, name)
    elif is_freed(tensor):
        raise StateError(
            f"the memory of {name} was freed, so the tensor has no elements to save",
            hint="keep a copy that you make while the tensor has its memory: .clone()",
        )
    shape = tuple(tensor.shape)
    if dtype == PAIRS:
        shape = (*shape[:-1], 2 * (shape or (1,))[-1])
    data = bytes_of(tensor) if tensor.numel() else b""
    place = place_of(tensor)
    mark = {"$tensor": _add(Tensor(dtype, shape, (data,)), name, tensor, place if place[0] else None, tensors, seen)}
    if dtype == PAIRS and not tensor.shape:
        add_options(mark, {"shape": []})
    if data and place[0] and form is None:
        _note_layout(tensor, mark, _name_in(mark), name, seen)
    return mark


def _encode_array(value: np.ndarray[Any, Any], name: str, tensors: dict[str, Tensor], seen: _Seen) -> dict[str, Any]:
    kind = ARRAYS.get(type(value))
    if kind is None and type(value) is not np.ndarray:
        raise StateError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a resume would restore as a "
            "plain array",
            hint="keep plain arrays; for a masked array, keep its data and its mask",
        )
    dtype = NUMPY_NAMES.get(value.dtype)
    if dtype is None:
        raise StateError(
            f"{name} is an array of {value.dtype}, which safetensors can't hold",
            hint="keep an array of numbers of up to 8 bytes in the machine's byte order, or a list: array.tolist()",
        )
    rows = np.asarray(value, order="C")
    # Copy some arrays: torch warns of read-only memory, and refuses negative strides, which a dimension of length 1 may
    # have.
    if not rows.flags.writeable or min(rows.strides, default=0) < 0:
        rows = rows.copy()
    data = TensorBytes(torch.from_numpy(rows)) if value.size else b""
    items = [each / value.itemsize for each in value.strides]
    place = (*_address_of(value), "whole", DTYPES[dtype], value.shape, tuple(items), torch.device("cpu"))
    mark = {"$array": _add(Tensor(dtype, value.shape, (data,)), name, value, place, tensors, seen)}
    if data:
        _note_layout(value, mark, _name_in(mark), name, seen)
    if kind is not None:
        add_options(mark, {"class": kind})
    if not value.flags.writeable:
        add_options(mark, {"read_only": True})
    return mark


def _address_of(value: np.ndarray[Any, Any]) -> tuple[int]:
    return (value.__array_interface__["data"][0],)


def _name_in(mark: dict[str, Any]) -> str:
    """Return the tensor's name that a mark, such as ``{"$tensor": name}``, contains."""
    name: str = next(iter((mark["$as"][0] if "$as" in mark else mark).values()))
    return name


def _note_layout(value: Any, mark: dict[str, Any], tensor: str, name: str, seen: _Seen) -> None:
    """Add a value's strides to its mark if the value's elements aren't stored row by row in memory."""
    extent = find_extent(value, tensor, mark)
    if not lies_by_rows(value):
        check_gaps(name, extent.stop - extent.start, value.nbytes)
        add_options(mark, {"strides": [*extent.strides]})
    if seen.is_exact:
        seen.extents.append(extent)


def _add(
    tensor: Tensor, name: str, value: Any, place: tuple[Any, ...] | None, tensors: dict[str, Tensor], seen: _Seen
) -> str:
    """Add a tensor to the payload, unless a tied tensor is already there. Return the name in the payload.

    Args:
        place: the place of ``value`` in memory; None if no other value can be tied to it.
    """
    if place in seen.places:
        return seen.places[place][1]
    while name in tensors or name == HEADER_METADATA:  # {"a.b": x} and {"a": {"b": y}} have the same dotted name
        name += "'"
    tensors[name] = tensor
    if tensor.size_bytes and place is not None:  # skip empty tensors, which may share an address without being tied
        seen.places[place] = (value, name)
    return name


def list_marked(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors that a state's tree refers to."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in ("$tensor", "$array") and isinstance(value, str):
                yield value
            else:
                yield from list_marked(value)
    for each in tree if isinstance(tree, list) else ():
        yield from list_marked(each)
