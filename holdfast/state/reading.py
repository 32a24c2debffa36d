"""The reading of a container's items for a save, if the container was passed to `run.keep`."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.errors import StateError
from holdfast.state.classes import FACTORIES
from holdfast.state.forms import describe_form, find_other_part
from holdfast.state.generators import is_generator, name_generator, read_generator
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
    can_make,
    describe_kind,
    inside,
    remake,
    sort_keys,
)
from holdfast.state.originals import Originals, Path, has_methods, is_container, is_tracked, is_tuple, name_path
from holdfast.state.tensor_forms import describe_shard, is_sharded, place_of
from holdfast.state.ties import Ties, has_memory
from holdfast.state.views import Views


class ContainerReader:
    """One reading of a container's items.

    Args:
        name: the container's name in the message of an error.
        is_strict: whether to refuse a tensor that has an autograd graph. If False, the tensor is saved without its
            graph.
    """

    def __init__(
        self,
        name: str,
        originals: Originals,
        ties: Ties,
        is_left_out: Callable[[Any, Any], bool] = lambda container, key: False,
        *,
        is_strict: bool = True,
    ) -> None:
        self._name, self._originals, self._ties = name, originals, ties
        self._is_left_out, self._is_strict = is_left_out, is_strict
        self._known: dict[int, Path] = {}  # containers and generators that were read
        self._new = ""  # the first object at a place that had none when the loop began
        self.objects = 0  # how many of the read items have a state_dict
        self._owned = ties.list_owned()
        self._names = {place_of(tensor): name for name, tensor in self._owned.items() if has_memory(tensor)}

    def read_all(self, container: Any) -> dict[str, Any]:
        """Return the state of the kept container, including the containers inside it."""
        self._views = Views(self._owned, self._ties, self._originals, container)
        state = self._read(container, (), ())
        # If the container has more objects than when the loop began, the caller reports that, with the numbers.
        if self._new and self.objects <= self._originals.objects:
            raise StateError(
                f"{self._new}, which wasn't there when the loop began: a resume couldn't make it",
                hint="make the object, and put it into the container, before run.keep",
            )
        return state

    def _read(self, container: Any, place: Path, origin: Path | None) -> dict[str, Any]:
        """Return the state of a container.

        Args:
            place: the path at which the container is now.
            origin: the container's path when the loop began; None if the outermost container didn't contain it then.
        """
        self._known[id(container)] = place
        if not isinstance(container, dict):
            items = [self._read_item(each, (*place, key), inside(origin, key)) for key, each in enumerate(container)]
            return {"value": items} | describe_kind(container)
        kept = [key for key in container if not self._is_left_out(container, key)]
        make = getattr(container, "default_factory", None)
        found = {
            key: self._read_item(container[key], (*place, key), inside(origin, key), make) for key in sort_keys(kept)
        }
        return {"value": {key: found[key] for key in kept}} | describe_kind(container)

    def _read_item(self, value: Any, place: Path, origin: Path | None, make: Any = None) -> Any:
        if isinstance(value, Tensor) and has_memory(value) and (name := self._names.get(place_of(value))) is not None:
            return {SAME if value is self._owned[name] else DETACHED: name}
        if is_tuple(value):
            return remake(
                value, (self._read_item(each, (*place, key), inside(origin, key)) for key, each in enumerate(value))
            )
        if not is_tracked(value):
            return value
        if id(value) in self._known:
            return {ITEM: None, HOW: {AGAIN: self._known[id(value)]}}
        number, expected = self._originals.find(value), self._originals.number_at(origin)
        how: dict[str, Any] = {}
        if number is not None and number != expected:
            how[MOVED] = number
        elif number is None and (other := self._ties.find_original(value, self._originals)) is not None:
            how[MOVED] = other
        elif number is None and expected is not None and not self._stays(value, expected):
            how[NEW] = True
        if is_sharded(value) and number is None and MOVED not in how:
            self._check_shard(value, place, expected)
        self._check(value, place, number, make)
        state: Any
        if isinstance(value, Tensor | np.ndarray):
            if number is None and MOVED not in how and (view := self._views.find(value)) is not None:
                return {ITEM: None, HOW: {VIEW: view}}
            how |= self._describe(value, number, expected) if isinstance(value, Tensor) else {}
            state = value
        elif is_container(value):
            state = self._read(value, place, self._originals.path_of(number) if number is not None else None)
        else:
            self.objects += has_methods(value)
            self._known[id(value)] = place
            if number is None and MOVED not in how:
                how |= self._check_form(value, place, expected)
            state = {"value": read_generator(value)} if is_generator(value) else value.state_dict()
        return {ITEM: state, HOW: how} if how else state

    def _stays(self, value: Any, expected: int) -> bool:
        """Return whether a restore can load the state of ``value`` into the original object that was at its place."""
        return has_methods(value) and not isinstance(value, nn.Module) and self._originals.form_of(expected) is not None

    def _check_shard(self, value: Any, place: Path, expected: int | None) -> None:
        """Raise StateError if no original says how a resume has to shard a new sharded tensor."""
        if self._originals.shard_of(expected) != describe_shard(value):
            raise StateError(
                f"{name_path(self._name, place)} is a new sharded tensor, which wasn't there when the loop began: a "
                "resume couldn't shard it over the ranks",
                hint="before run.keep put a tensor with the same sharding at this place: parameter.detach().clone()",
            )

    def _check(self, value: Any, place: Path, number: int | None, make: Any) -> None:
        """Raise StateError if a restore would turn an item into a different value.

        Args:
            make: the default factory, if the item is in a defaultdict.
        """
        name, kind = name_path(self._name, place), type(value)
        if (
            isinstance(value, Tensor)
            and kind not in (Tensor, nn.Parameter)
            and not is_sharded(value)
            and number is None
        ):
            raise StateError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, which a resume would restore as a plain tensor",
                hint=f"keep the plain tensor: {name}.as_subclass(torch.Tensor)",
            )
        if self._is_strict and isinstance(value, Tensor) and value.grad_fn is not None:
            raise StateError(
                f"{name} can't be saved: it is part of a computation through which gradients flow",
                hint=f"keep only its values: {name}.detach()",
            )
        is_made = make is not None and make not in FACTORIES.values()
        if is_container(value) and number is None and not can_make(value) and not is_made:
            own = " with a function of its own" if kind is defaultdict else ""
            raise StateError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}{own}, which a resume can't rebuild",
                hint=f"keep a plain dict or list in its place, or make {name} before the loop and don't replace it",
            )

    def _check_form(self, value: Any, place: Path, expected: int | None) -> dict[str, Any]:
        """Return the facts that a restore needs, besides the state, about an object that has replaced an original.

        Raises:
            StateError: the original has a different form, so that a restore couldn't make the new object from it.
        """
        name, kind, now = name_path(self._name, place), type(value).__qualname__, describe_form(value)
        built = self._originals.form_of(expected)
        if is_generator(value):
            return {MAKE: name_generator(value)} if built != now else {}
        if built is None:
            self._new = self._new or f"{name} is a new {kind}"
            return {}
        hint = (
            "create both objects before run.keep, keep each of them, and keep a number or text that says which one a "
            "step uses; or change the first object in place"
        )
        if isinstance(value, torch.optim.Optimizer):
            hint += ": optimizer.state.clear() removes its moments"
        if built.kind is not now.kind or isinstance(value, torch.optim.Optimizer):
            raise StateError(
                f"{name} has become a new {kind}, and a resume would load its state into the "
                f"{built.kind.__qualname__} that was there when the loop began",
                hint=hint,
            )
        if part := find_other_part(built, now):
            raise StateError(
                f"{name} has become a new {kind}, whose {part} differs from the one when the loop began: a resume "
                f"couldn't make the new {kind} again",
                hint=hint,
            )
        return {SWITCHES: now.switches} if now.switches != built.switches else {}

    def _describe(self, value: Tensor, number: int | None, expected: int | None) -> dict[str, Any]:
        """Return the facts that a restore needs besides a tensor's elements: class, device, and ``requires_grad``.

        Args:
            number: the tensor's number among the originals; None if it isn't an original.
            expected: the number of the original at the tensor's place; None if there is none.
        """
        how: dict[str, Any] = {}
        if number is not None:
            return {LEARNS: value.requires_grad} if value.requires_grad != self._originals.learned(number) else {}
        if value.requires_grad and value.is_leaf:
            how[LEARNS] = True
        if isinstance(value, nn.Parameter):
            how[CLASS] = "Parameter"
        if not is_sharded(value) and value.device.type != self._originals.device_of(expected):
            how[DEVICE] = value.device.type
        return how
