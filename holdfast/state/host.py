"""Copies of a state in the host's memory, because a GPU may have no memory left for them."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.state.tensor_forms import is_sharded


def copy_to_host(state: dict[str, Any]) -> Callable[[str], Any]:
    """Copy a state. Return a function that returns a component's copy, with each tensor on the device that it was on.

    Until that call, the copies of tensors in dicts, lists, tuples and sets are in the host's memory.
    """
    found = {id(each): each for each in _list_tensors(state, set()) if is_on_device(each)}
    memo: dict[int, Any] = {key: _like(each, each.detach().cpu()) for key, each in found.items()}
    hosted = {id(memo[key]): each.device for key, each in found.items()}  # `copied` keeps these tensors
    copied = copy.deepcopy(state, memo)
    del memo, found, state

    def take(name: str) -> Any:
        own = (each for each in _list_tensors(copied[name], set()) if id(each) in hosted)
        memo = {id(each): _like(each, each.detach().to(hosted[id(each)])) for each in own}
        return copy.deepcopy(copied[name], memo) if memo else copied[name]

    return take


def clone_on_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in the host's memory unless the tensor is sharded or sparse."""
    return tensor.detach().cpu() if is_on_device(tensor) else tensor.detach().clone()


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is an ordinary tensor in the memory of a device other than the host."""
    return tensor.device.type not in ("cpu", "meta") and tensor.layout is torch.strided and not is_sharded(tensor)


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """Return a copy as a parameter if the tensor is one, and with the tensor's ``requires_grad``."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _list_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set | frozenset | deque) and id(value) not in seen:
        seen.add(id(value))
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _list_tensors(each, seen)
