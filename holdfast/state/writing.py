"""The restore of a container's items from their saved state, if the container was passed to `run.keep`."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.errors import StateError
from holdfast.state.forms import set_switches
from holdfast.state.generators import clone_generator, is_generator, make_generator, write_generator
from holdfast.state.items import (
    AGAIN,
    CLASS,
    DETACHED,
    DEVICE,
    HOW,
    ITEM,
    LEARNS,
    MAKE,
    MOVED,
    NEW,
    SAME,
    SWITCHES,
    VIEW,
    describe_kind,
    inside,
    kind_in,
    make_container,
    overlaps,
    remake,
    sort_keys,
)
from holdfast.state.layout import copy_into, move, strides_of
from holdfast.state.mapped import is_foreign
from holdfast.state.optimizers import loading_exactly
from holdfast.state.originals import Originals, Path, is_container, is_stateful, is_tuple, name_path
from holdfast.state.tensor_forms import is_sharded, local_of, place_of
from holdfast.state.ties import Ties, has_memory, place_in_memory
from holdfast.state.views import Views


class ContainerWriter:
    """One restore of a container's items.

    Args:
        name: the container's name in the message of an error.
    """

    def __init__(self, name: str, originals: Originals, ties: Ties) -> None:
        self._name, self._originals, self._ties = name, originals, ties
        self._made: dict[Path, Any] = {}  # the containers and generators that were restored, by path
        # For each original's place in memory, the place of the saved value that was written into the original.
        self._written: dict[Any, Any] = {}
        self._owned = ties.list_owned()
        self._names = {place_of(tensor): name for name, tensor in self._owned.items() if has_memory(tensor)}

    def write_all(self, container: Any, state: dict[str, Any]) -> None:
        """Restore the kept container from the result of `ContainerReader.read_all`."""
        self._fill(container, state, (), ())

    def _fill(self, container: Any, state: dict[str, Any], place: Path, origin: Path | None) -> None:
        self._made[place] = container
        saved = state["value"]
        if not isinstance(container, dict):
            items = [self._write_item(each, (*place, key), inside(origin, key)) for key, each in enumerate(saved)]
            container.clear()
            container.extend(items)
            return
        make = getattr(container, "default_factory", None)
        found = {
            key: self._write_item(saved[key], (*place, key), inside(origin, key), make) for key in sort_keys([*saved])
        }
        container.clear()
        for key in saved:  # don't use `update`, which adds counts in a Counter
            container[key] = found[key]

    def _write_item(self, saved: Any, place: Path, origin: Path | None, make: Any = None) -> Any:
        """Restore an item that `ContainerReader` has read, and return the item. An original is restored in place."""
        if is_tuple(saved):
            return remake(
                saved, (self._write_item(each, (*place, key), inside(origin, key)) for key, each in enumerate(saved))
            )
        how: dict[str, Any] = {}
        if isinstance(saved, dict) and saved.keys() == {ITEM, HOW}:
            saved, how = saved[ITEM], saved[HOW]
        if AGAIN in how:
            return self._made[tuple(how[AGAIN])]
        if VIEW in how:
            return Views(self._owned, self._ties, self._originals).take(how[VIEW])
        template = self._originals.get(self._originals.number_at(origin))
        own, inner = template, origin
        if NEW in how:
            own, inner = None, None
        elif MOVED in how:
            own, inner = self._ties.get_original(how[MOVED], self._originals)
        if isinstance(saved, Tensor | np.ndarray):
            return self._write_numbers(own, saved, how, template, place)
        if isinstance(saved, dict):
            return self._write_state(own, saved, how, template, place, inner, make)
        return saved

    def _write_state(
        self, own: Any, saved: dict[str, Any], how: dict[str, Any], template: Any, place: Path, inner: Any, make: Any
    ) -> Any:
        if saved.keys() in ({SAME}, {DETACHED}):
            ((key, name),) = saved.items()
            if name not in self._owned:
                raise StateError(
                    f"a kept container had a kept module's tensor {name}, but no kept module has this tensor now",
                    hint="build the modules that the run had when it saved the checkpoint",
                )
            return self._owned[name] if key == SAME else self._owned[name].detach()
        if MAKE in how:
            own = make_generator(how[MAKE])
        elif NEW in how and is_generator(template) and not isinstance(saved["value"], list):
            own = clone_generator(template)
        elif NEW in how and isinstance(template, nn.Module):
            own = copy.deepcopy(template)
            if SWITCHES in how:
                set_switches(own, how[SWITCHES])
        if is_stateful(own) and not is_container(own):
            self._made[place] = own
            if is_generator(own):
                write_generator(own, saved["value"])
            else:
                with loading_exactly([own] if isinstance(own, torch.optim.Optimizer) else []):
                    own.load_state_dict(saved)
            return own
        if not isinstance(saved.get("value"), dict | list):
            raise StateError(
                "a kept container had an object whose state can't be loaded, because the object doesn't exist when "
                "the run resumes",
                hint="put the object into the container before run.keep",
            )
        if own is None and make is not None and is_container(made := make()):
            own = made
        if not is_container(own) or describe_kind(own) | {"is": isinstance(own, dict)} != kind_in(saved):
            own, inner = make_container(saved), inner if is_container(own) else None
        self._fill(own, saved, place, inner)
        return own

    def _write_numbers(self, own: Any, saved: Any, how: dict[str, Any], template: Any, place: Path) -> Any:
        """Return a restored tensor or array: the original if the saved value fits into it, otherwise a new object."""
        device = self._choose_device(how, own if own is not None else template)
        if _has_no_place(saved):
            return self._write_without_place(own, saved, how, device, place)
        found = self._ties.find(saved)
        if found is not None and not (isinstance(found, Tensor) and found.requires_grad and LEARNS not in how):
            return found
        # Versions before 0.2 don't record which item has replaced an original, so two saved items may fit one original.
        # Only the first of these two items is written into the original.
        fits = self._fits(own, saved) or (self._is_free(own, saved) and resize_like(own, saved))
        if fits and self._written.setdefault(place_in_memory(own), place_in_memory(saved)) == place_in_memory(saved):
            self._write(own, saved, place)
            value = own if LEARNS not in how else own.requires_grad_(how[LEARNS])
        else:
            value = _finish(move(saved, device), how) if isinstance(saved, Tensor) and device is not None else saved
        self._ties.note(saved, value)
        return value

    def _write_without_place(self, own: Any, saved: Any, how: dict[str, Any], device: Any, place: Path) -> Any:
        """Return a restored value that shares memory with no other value, because it is empty or sharded."""
        if _is_alike(own, saved):
            if is_sharded(saved):
                self._write(local_of(own), local_of(saved), place)
            return own if LEARNS not in how else own.requires_grad_(how[LEARNS])
        if not is_sharded(saved) and self._is_free(own, saved) and resize_like(own, saved):
            return own
        return _finish(saved.to(device) if device is not None else saved, how) if isinstance(saved, Tensor) else saved

    def _write(self, own: Any, saved: Any, place: Path) -> None:
        """Write elements into an original, if its elements differ.

        Raises:
            StateError: the original's memory is mapped from a file, or read-only.
        """
        if has_same_bits(own, saved):
            return
        if is_foreign(own):
            raise StateError(
                f"{name_path(self._name, place)} is mapped from a file, to which a resume doesn't write",
                hint="keep a copy: .clone() of a tensor, .copy() of an array",
            )
        if isinstance(own, Tensor):
            copy_into(own, saved)
        else:
            own[...] = saved

    def _choose_device(self, how: dict[str, Any], like: Any) -> torch.device | None:
        """Return the device for a restored tensor: one of the saved type (CPU or GPU) if this machine has it.

        Otherwise, return the device of ``like``.
        """
        own = like.device if isinstance(like, Tensor) else torch.device("cpu")
        if DEVICE not in how or own.type == how[DEVICE]:
            return own
        if how[DEVICE] == "cuda" and not torch.cuda.is_available():
            return own
        return torch.device(how[DEVICE])

    def _fits(self, own: Any, saved: Any) -> bool:
        """Return whether a saved tensor or array can be written into an original."""
        if not self._is_free(own, saved) or (own.dtype, own.shape) != (saved.dtype, saved.shape):
            return False
        return not overlaps(own) or strides_of(own) == strides_of(saved)

    def _is_free(self, own: Any, saved: Any) -> bool:
        """Return whether an original has the saved kind, and whether a restore may write to it."""
        if isinstance(saved, Tensor):
            if not isinstance(own, Tensor) or is_sharded(own) or own.layout is not torch.strided:
                return False
            return not has_memory(own) or place_of(own) not in self._names
        if not isinstance(own, np.ndarray) or type(own) is not type(saved):
            return False
        return own.flags.writeable == saved.flags.writeable and (own.flags.writeable or has_same_bits(own, saved))


def resize_like(own: Any, saved: Any) -> bool:
    """Give a tensor the saved shape, dtype and strides, which a step has changed in place. Return False if it can't."""
    if not isinstance(own, Tensor) or own.is_meta or is_foreign(own):
        return False
    own.data = torch.empty_strided(saved.shape, saved.stride(), dtype=saved.dtype, device=own.device)
    return True


def _has_no_place(value: Any) -> bool:
    """Return whether a saved value is sharded, empty or without memory, so that no other value can be tied to it."""
    return is_sharded(value) or not has_memory(value) if isinstance(value, Tensor) else not value.size


def _is_alike(own: Any, saved: Any) -> bool:
    """Return whether a saved value that `_has_no_place` can be restored by a write into an original."""
    if is_sharded(saved) != is_sharded(own) or isinstance(saved, Tensor) != isinstance(own, Tensor):
        return False
    if own is None or (own.dtype, own.shape) != (saved.dtype, saved.shape):
        return False
    if isinstance(saved, np.ndarray):
        return type(own) is type(saved) and own.flags.writeable == saved.flags.writeable
    return not is_sharded(saved) or (own.device_mesh, own.placements) == (saved.device_mesh, saved.placements)


def _finish(value: Tensor, how: dict[str, Any]) -> Tensor:
    if how.get(CLASS) == "Parameter":
        return nn.Parameter(value, requires_grad=how.get(LEARNS, False))
    return value.requires_grad_() if how.get(LEARNS) else value


def has_same_bits(one: Any, other: Any) -> bool:
    """Return whether two tensors, or two arrays, have equal dtypes, shapes and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if isinstance(one, np.ndarray):
        return place_in_memory(one) == place_in_memory(other) or bool(one.tobytes() == other.tobytes())
    if has_memory(one) and has_memory(other) and place_of(one) == place_of(other):
        return bool(one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg())
    return torch.equal(_bytes_of(one), _bytes_of(other.to(one.device)))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
