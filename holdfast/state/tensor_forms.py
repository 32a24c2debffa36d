"""The forms of tensors: a whole tensor, or one of which each rank holds a region.

A form's code is imported at the first tensor of the form.
"""

import functools
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch

from holdfast.checkpoint import Payload, Tensor
from holdfast.checkpoint.payload import Source
from holdfast.state.tensors import TensorBytes

T = TypeVar("T")

# For each class of sharded tensors (its module and its name): the `TensorForm` that handles them, as ``module:object``.
# The class is named and not imported, because importing it costs 1.3 s, also for a run without sharded tensors.
FORMS = {("torch.distributed.tensor", "DTensor"): "holdfast.state.shards:SHARDED"}


class RegionBytes:
    """The bytes of a tensor of which each rank holds a region; a `checkpoint.payload.Source`.

    Attributes:
        tensor: the tensor.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class TensorForm(Protocol):
    """A form of tensors that are divided over the ranks. Each method gets a tensor of this form."""

    def check(self, tensor: Any, name: str) -> None:
        """Raise StateError if the tensor can't be saved. The message has the name."""

    def bytes_of(self, tensor: Any) -> Source:
        """Return the bytes of the whole tensor, of which this rank holds a region."""

    def local(self, tensor: Any) -> torch.Tensor:
        """Return a view of the region that this rank holds."""

    def whole(self, tensor: Any) -> Any:
        """Return the whole tensor. All ranks call this together."""

    def place(self, tensor: Any) -> tuple[Any, ...]:
        """Return the tensor's place in memory; see `place_of`."""

    def describe(self, tensor: Any) -> tuple[Any, ...]:
        """Return the tensor's shape, mesh and placements."""

    def list_rows(self, tensor: Any, *, is_by_place: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the rows that this rank adds to the whole tensor's checksum, each with its offset in bytes."""


@functools.cache
def _load(name: str) -> TensorForm:
    form: TensorForm = pkgutil.resolve_name(name)
    return form


def find_form(value: Any) -> TensorForm | None:
    """Return the form of a tensor that is divided over the ranks; None for a whole tensor, and for any other value."""
    for (module, kind), name in FORMS.items():
        if (found := sys.modules.get(module)) is not None and isinstance(value, getattr(found, kind)):
            return _load(name)
    return None


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor that is sharded over the ranks or replicated in them, such as a `DTensor`."""
    return find_form(value) is not None


def local_of(tensor: Any) -> torch.Tensor:
    """Return a view of the region of a tensor that this rank holds; of a whole tensor, the tensor."""
    form = find_form(tensor)
    return tensor.detach() if form is None else form.local(tensor)


def gather_whole(value: T) -> T:
    """Return a sharded tensor as a whole tensor, and any other value as it is.

    For a sharded tensor all ranks call this together.
    """
    form = find_form(value)
    whole: T = value if form is None else form.whole(value)
    return whole


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's place in memory. Two tensors with equal places are tied."""
    if (form := find_form(tensor)) is not None:
        return form.place(tensor)
    return tensor.data_ptr(), "whole", tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def describe_shard(tensor: Any) -> tuple[Any, ...]:
    """Return a sharded tensor's shape, mesh and placements."""
    form = find_form(tensor)
    assert form is not None
    return form.describe(tensor)


def bytes_of(tensor: torch.Tensor) -> Source:
    """Return a tensor's bytes, for a payload."""
    form = find_form(tensor)
    return TensorBytes(tensor) if form is None else form.bytes_of(tensor)


def list_shards(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the sharded tensors in nested mappings and lists, each with its dotted name."""
    if is_sharded(value):
        yield name, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from list_shards(item, f"{name}.{key}" if name else str(key))


# ---- the tensors of a payload


def shard_of(tensor: Tensor) -> Any:
    """Return the sharded tensor from which a payload's tensor was made; None if the tensor isn't sharded."""
    piece = tensor.pieces[0] if tensor.pieces else None
    return piece.tensor if isinstance(piece, RegionBytes) else None


def has_shards(payload: Payload) -> bool:
    """Return whether some of a state's tensors are sharded."""
    return any(shard_of(tensor) is not None for tensor in payload.tensors.values())


def localize(payload: Payload) -> Payload:
    """Return a state in which this rank's shard, a plain tensor, replaces each sharded tensor."""
    return Payload({name: _localize(tensor) for name, tensor in payload.tensors.items()}, payload.tree)


def list_moved(saved: Payload, now: Payload) -> list[str]:
    """Return the names of sharded tensors in ``saved`` that are sharded differently in ``now``."""
    places = {name: _describe_place(each) for name, each in saved.tensors.items()}
    common = [name for name, place in places.items() if place is not None and name in now.tensors]
    return [name for name in common if _describe_place(now.tensors[name]) != places[name]]


def _describe_place(tensor: Tensor) -> Any:
    """Return a tensor's mesh and placements; None if the tensor is not sharded."""
    shard = shard_of(tensor)
    return None if shard is None else describe_shard(shard)[1:]


def _localize(tensor: Tensor) -> Tensor:
    if (shard := shard_of(tensor)) is None:
        return tensor
    local = local_of(shard)
    return Tensor(tensor.dtype, tuple(local.shape), (TensorBytes(local) if local.numel() else b"",))


def list_tensors(payload: Payload) -> Mapping[str, Any]:
    """Return the tensors, sharded or whole, of which a payload has the bytes, by name."""
    pieces = {name: tensor.pieces[0] for name, tensor in payload.tensors.items() if tensor.pieces}
    return {name: each.tensor for name, each in pieces.items() if isinstance(each, TensorBytes | RegionBytes)}
