"""The decoding of a state from tensors and one JSON value: the inverse of `holdfast.state.encoding`."""

import base64
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint import Payload, Tensor, copy_pieces, count_cores, in_memory
from holdfast.provenance.canonical import read_exactly
from holdfast.state.classes import find_class, is_enum, is_named, is_of_plain, make_again
from holdfast.state.encoding import ARRAYS, DTYPES, PAIRS
from holdfast.state.layout import Memories
from holdfast.state.tensor_forms import RegionBytes
from holdfast.state.tensors import TensorBytes

LARGE_BYTES = 2**21


def from_payload(payload: Payload, lent: Collection[str] = (), *, copied_bytes: int | None = None) -> Any:
    """Decode a payload into the state that `to_payload` encoded. Each tensor gets new memory with torch's alignment.

    Args:
        copied_bytes: tensors of this process's own state that are larger than this aren't copied, but returned with
            their memory.
        lent: top-level keys of the state whose tensors may be views of the payload's memory. This saves time, because
            new memory costs more than reading the bytes. Pass only keys whose tensors the caller copies.
    """
    decoder = _Decoder(payload, copied_bytes)
    if lent:
        state = {name: decoder.decode(value, is_lent=name in lent) for name, value in payload.tree.items()}
    else:
        state = decoder.decode(payload.tree, is_lent=False)
    decoder.fill()
    return state


class _Decoder:
    """One decoding of a payload: `decode` creates the tensors, and `fill` then copies their elements."""

    def __init__(self, payload: Payload, copied_bytes: int | None) -> None:
        self._tensors, self._copied_bytes = payload.tensors, copied_bytes
        self._own: dict[str, torch.Tensor] = {}
        self._memories = Memories()

    def _take(self, name: str, *, is_lent: bool) -> torch.Tensor:
        """Return the tensor of this name, with its elements row by row; `fill` copies the elements later.

        With ``is_lent``, return a view of the payload's memory instead, if the elements are in one piece of memory.
        """
        tensor = self._tensors[name]
        piece, *others = tensor.pieces or (b"",)
        if isinstance(piece, RegionBytes):
            whole: torch.Tensor = piece.tensor
            return whole
        if (live := self._find_live(tensor)) is not None:
            return live
        if is_lent and not others and len(piece):
            flat = torch.frombuffer(in_memory(piece), dtype=DTYPES[tensor.dtype])
            return flat.view(shape_of(tensor.dtype, tensor.shape))
        if name not in self._own:
            self._own[name] = _new(tensor)
        return self._own[name]

    def _find_live(self, tensor: Tensor, size_bytes: int = 0) -> torch.Tensor | None:
        """Return a tensor of this process's own state, as it is in memory; None if the tensor is to be copied.

        Args:
            size_bytes: the size of the memory that the tensor shares with others.
        """
        piece = tensor.pieces[0] if tensor.pieces else b""
        is_large = self._copied_bytes is not None and max(tensor.size_bytes, size_bytes) > self._copied_bytes
        return piece.tensor.detach() if is_large and isinstance(piece, TensorBytes) else None

    def fill(self) -> None:
        """Copy the elements from the payload into each tensor that has new memory."""
        with ThreadPoolExecutor(count_cores()) as pool:
            filling = []
            for name, copy in self._own.items():
                if copy.nbytes >= LARGE_BYTES:  # the first write to new memory is slow, so several threads write
                    filling.append(pool.submit(_fill, copy, self._tensors[name]))
                else:  # passing a small copy to a thread costs more than the copy
                    _fill(copy, self._tensors[name])
            for each in filling:
                each.result()
        self._memories.fill()

    def decode(self, value: Any, *, is_lent: bool) -> Any:
        """Return the value of the state that ``value``, a part of the payload's tree, encodes."""

        def decode(inner: Any) -> Any:
            return self.decode(inner, is_lent=is_lent)

        if isinstance(value, list):
            return [*map(decode, value)]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            mark, inner = next(iter(value.items()))
            if mark == "$tensor":  # tied tensors have one name, so the restored tensors share memory, too
                return self._take(inner, is_lent=is_lent)
            if mark == "$array":
                return self._take(inner, is_lent=False).numpy()
            if mark == "$as":
                return self._lay_out(*inner, is_lent=is_lent)
            if mark == "$tuple":
                return tuple(map(decode, inner))
            if mark == "$dict":
                return {decode(key): decode(item) for key, item in inner}
            if mark in _MADE:
                return _MADE[mark](inner, decode)
        return {key: decode(item) for key, item in value.items()}

    def _lay_out(self, mark: dict[str, str], options: dict[str, Any], *, is_lent: bool) -> Any:
        """Return a tensor or an array that has a special layout or class.

        Args:
            mark: the mark in the payload's tree, such as ``{"$tensor": name}``.
            options: the differences from a plain tensor with its elements row by row.
        """
        ((kind, name),) = mark.items()
        live = self._find_live(self._tensors[name], options.get("size", 0)) if kind == "$tensor" else None
        if live is not None:
            return live
        rows = self._take(name, is_lent=is_lent and kind == "$tensor")
        if "shape" in options:
            rows = rows.view(options["shape"])
        found = self._memories.make(kind, name, rows, options)
        if "class" in options:
            found = found.view(next(each for each, name in ARRAYS.items() if name == options["class"]))
        if "read_only" in options:
            found = found.view()
            found.flags.writeable = False
        return found


# torch's data types by name.
DATA_TYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}


def _with_attributes(items: dict[Any, Any], attributes: dict[str, Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(items)
    vars(made).update(attributes)
    return made


# For each mark, the function that creates the value. The function's arguments are the JSON value under the mark, and a
# function that decodes inner values.
_MADE: dict[str, Any] = {
    "$int": lambda inner, decode: int(inner),
    "$float": lambda inner, decode: read_exactly({"$float": inner}),
    "$complex": lambda inner, decode: complex(*map(decode, inner)),
    "$bytes": lambda inner, decode: base64.b64decode(inner),
    "$device": lambda inner, decode: torch.device(inner),
    "$dtype": lambda inner, decode: DATA_TYPES[inner],
    "$attributes": lambda inner, decode: _with_attributes(*map(decode, inner)),
    "$number": lambda inner, decode: np.dtype(inner[0]).type(decode(inner[1])),
    "$enum": lambda inner, decode: find_class(inner[0], inner[1], is_enum)(decode(inner[2])),
    "$typed": lambda inner, decode: make_again(find_class(inner[0], inner[1], is_of_plain), decode(inner[2])),
    "$named": lambda inner, decode: find_class(inner[0], inner[1], is_named)._make(map(decode, inner[2])),
}


def shape_of(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a payload tensor's shape in torch, which packs two 4-bit numbers into an element."""
    return (*shape[:-1], shape[-1] // 2) if dtype == PAIRS else shape


def _new(tensor: Tensor) -> torch.Tensor:
    return torch.empty(shape_of(tensor.dtype, tensor.shape), dtype=DTYPES[tensor.dtype])


def _fill(copy: torch.Tensor, tensor: Tensor) -> None:
    copy_pieces(tensor.pieces, copy.view(-1).view(torch.uint8).numpy().data)
