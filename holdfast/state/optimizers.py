"""The restore of an optimizer's state with the saved types.

torch's ``load_state_dict`` casts the tensors of a parameter's state to the parameter's dtype, also inside lists, tuples
and dicts (pytorch#43706). That rounds float32 factors to bf16, and turns counts into floats. Arrays, texts and named
tuples raise errors or come back as different values.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from holdfast.state.layout import move
from holdfast.state.tensor_forms import is_sharded

# torch leaves a tensor of this key on its device, except for optimizers with these settings.
STEP, ON_DEVICE = "step", ("fused", "capturable")


@contextlib.contextmanager
def loading_exactly(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore optimizers' states with the saved types, if the block loads them with torch's ``load_state_dict``.

    The tensors among the settings of parameter groups, such as a learning rate, are restored in place: torch puts new
    tensors into the groups, but a loop or a different group may refer to the old tensors.
    """
    optimizers = list(optimizers)
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            loading = _Loading()
            stack.callback(each.register_load_state_dict_pre_hook(loading.hide).remove)
            # Called before the optimizer's own hooks, which may read the state.
            stack.callback(each.register_load_state_dict_post_hook(loading.fill, prepend=True).remove)
        with _groups_in_order(optimizers), _rates_in_place(optimizers):
            yield


class _Hidden:
    """The place of a value that torch's ``load_state_dict`` would change."""


class _Loading:
    """One call of ``load_state_dict``: the saved values by parameter, which torch gets in a different form."""

    def __init__(self) -> None:
        self._saved: dict[Any, Any] = {}
        self._stubs: dict[int, Tensor] = {}
        self._placed: dict[int, Any] = {}  # by the id of a saved tensor: the tensor on its device

    def hide(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state in a form that torch doesn't change."""
        numbers = (number for group in state["param_groups"] for number in group["params"])
        members = dict(zip(numbers, _list_stepped(optimizer), strict=False))
        self._saved = {members.get(key, key): values for key, values in state["state"].items()}
        is_torchs = type(optimizer).__setstate__.__module__.startswith("torch.")
        hidden = dict(state["state"])
        for key in hidden.keys() & members.keys():
            values, like = hidden[key], members[key]
            if isinstance(values, dict):
                hidden[key] = {name: self._hide(each, like, is_torchs) for name, each in values.items()}
            else:
                hidden[key] = self._hide(values, like, is_torchs)
        return state | {"state": hidden}

    def _hide(self, value: Any, parameter: Tensor, is_torchs: bool) -> Any:
        if isinstance(value, Tensor):
            is_cast = parameter.is_floating_point() and value.dtype != parameter.dtype
            if not is_cast or not is_torchs or is_sharded(value) or is_sharded(parameter):
                return value
            stub = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(value.shape)
            self._stubs[id(stub)] = stub
            return stub
        is_castable = type(value) in (list, tuple, dict, set) and not is_torchs
        return value if is_castable or not isinstance(value, Iterable) else _Hidden()

    def fill(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the saved values into the optimizer's state."""
        first = next(_list_stepped(optimizer), None)
        groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        for key in self._saved.keys() & optimizer.state.keys():
            values, own, group = self._saved[key], optimizer.state[key], groups.get(key, {})
            if key not in groups:  # torch leaves the tensors of other keys on the CPU
                optimizer.state[key] = self._place(values, first, "", group)
            elif isinstance(values, dict) and isinstance(own, dict):
                for name in own.keys() & values.keys():
                    own[name] = self._choose(own[name], values[name], key, name, group)
                if type(own) is not type(values):
                    optimizer.state[key] = refill(values, own.items())
            else:
                optimizer.state[key] = self._choose(own, values, key, "", group)
        self._saved, self._stubs, self._placed = {}, {}, {}

    def _choose(self, now: Any, saved: Any, like: Any, name: Any, group: dict[str, Any]) -> Any:
        """Return the saved value, or the value ``now`` that the optimizer's own code has made from it."""
        if isinstance(now, _Hidden) or id(now) in self._stubs:
            return self._place(saved, like, name, group)
        if isinstance(saved, Tensor) and isinstance(now, Tensor):
            if now.dtype == saved.dtype:
                return self._placed.setdefault(id(saved), now)
            return self._place(saved, like, name, group)
        is_cast = type(saved) in (list, tuple, dict, set) and type(now) is type(saved)
        return self._place(saved, like, name, group) if is_cast else now

    def _place(self, value: Any, like: Any, name: Any, group: dict[str, Any]) -> Any:
        """Return a value with its tensors on the device to which torch moves them."""
        if isinstance(value, Tensor):
            stays = like is None or is_sharded(value) or (name == STEP and not any(map(group.get, ON_DEVICE)))
            return value if stays else self._placed.setdefault(id(value), move(value, like.device))
        if isinstance(value, dict):
            items = [(key, self._place(each, like, key, group)) for key, each in value.items()]
            return refill(value, items)
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            found = [self._place(each, like, "", group) for each in value]
            return value._make(found) if hasattr(value, "_make") else type(value)(found)
        return value


def refill(value: Any, items: Any) -> Any:
    """Return a dict of the same class as ``value``, with the same attributes, and with these items."""
    made = value.copy()
    made.clear()
    for key, each in items:  # don't use `update`, which adds counts in a Counter
        made[key] = each
    return made


def _list_stepped(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


@contextlib.contextmanager
def _groups_in_order(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep the order of the parameter groups' keys in the block.

    A checkpoint has the keys sorted, but a second kept object may save them in the groups' own order.
    """
    orders = [[list(group) for group in each.param_groups] for each in optimizers]
    yield
    for optimizer, groups in zip(optimizers, orders, strict=True):
        for group, order in zip(optimizer.param_groups, groups, strict=False):
            items = {key: group[key] for key in order if key in group} | group
            group.clear()
            group.update(items)


@contextlib.contextmanager
def _rates_in_place(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore the tensors among the settings of parameter groups in place, after the block has loaded them."""
    found = [
        (each, number, key, value)
        for each in optimizers
        for number, group in enumerate(each.param_groups)
        for key, value in group.items()
        if isinstance(value, Tensor)
    ]
    yield
    for optimizer, number, key, own in found:
        now = optimizer.param_groups[number].get(key)
        if isinstance(now, Tensor) and (now.shape, now.dtype) == (own.shape, own.dtype):
            with torch.no_grad():
                own.copy_(now)
            optimizer.param_groups[number][key] = own
