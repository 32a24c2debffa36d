"""The sharded tensors that a program has built, by name, and their layout over the ranks."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.checkpoint import Payload
from holdfast.recipe import Recipe
from holdfast.state.items import ITEM
from holdfast.state.tensor_forms import list_shards, shard_of
from holdfast.training.kept import GRADIENTS
from holdfast.training.left_gradients import UNSYNCED
from holdfast.training.unsynced import like_stack

# The sharded tensors by name: ``model.layer.weight`` or ``extras.average.layer.weight``.
Shards = Mapping[str, Any]
PARAMETERS = "parameters"
# The names of unsynced gradients begin with these keys of the extras.
WAITING = f"{GRADIENTS}..{UNSYNCED}."
OF_ITEMS = re.compile(rf"\.{ITEM}(?=\.|$)")


def find_shards(recipe: Recipe) -> Shards:
    """Return the sharded tensors of the model and the extras, by name; empty if there are none.

    Parameters are listed a second time under the names of ``named_parameters``, with the prefix `PARAMETERS`. Their
    names in a ``state_dict`` may differ, because ``checkpoint_wrapper`` leaves its prefix out, and hooks rename or
    split tensors.
    """
    extras = {name: extra.state_dict() for name, extra in recipe.extras.items()}
    modules = {"model": recipe.model} | {f"extras.{name}": each for name, each in recipe.extras.items()}
    parameters = {
        f"{prefix}.{name}": each
        for prefix, module in modules.items()
        if isinstance(module, nn.Module)
        for name, each in module.named_parameters(remove_duplicate=False)
    }
    return dict(list_shards({"model": recipe.model.state_dict(), "extras": extras, PARAMETERS: parameters}))


def find_unplaced(payload: Payload, shards: Shards) -> str:
    """Return the name of a sharded tensor whose present sharding a resume couldn't repeat; empty if there is none.

    Args:
        payload: the state of the model and the optimizer, in the form in which it is saved.
        shards: see `find_shards`.
    """
    for name, tensor in payload.tensors.items():
        if (own := shard_of(tensor)) is not None:
            like = find_shard(name, shards)
            if like is None or _describe_layout(like) != _describe_layout(own):
                return name
    return ""


def _describe_layout(shard: Any) -> tuple[Any, ...]:
    return shard.device_mesh, shard.placements, shard.shape


def find_shard(name: str, shards: Shards) -> Any:
    """Return the sharded tensor whose layout a tensor of the checkpoint gets; None if that tensor isn't sharded.

    An optimizer's state of a parameter, such as ``optimizer.state.layer.weight.exp_avg``, is sharded like the
    parameter.

    Args:
        name: the name of the checkpoint's tensor.
    """
    component, _, rest = name.partition(".")
    if component == "extras":  # the name continues with a number: ``extras`` is a list with an item for each rank
        _, _, rest = rest.partition(".")
        if rest.startswith(WAITING):
            parameter = shards.get(f"{PARAMETERS}.model.{rest.removeprefix(WAITING)}")
            return None if parameter is None else like_stack(parameter)
        if rest.startswith(f"{GRADIENTS}."):  # gradients are sharded like their parameters
            return shards.get(f"{PARAMETERS}.model.{rest.removeprefix(f'{GRADIENTS}.')}")
        # A value that has replaced another in a kept container is the ``item`` of a saved description.
        return shards.get(f"extras.{rest}", shards.get(f"extras.{OF_ITEMS.sub('', rest)}"))
    if component != "optimizer":
        return shards.get(name)
    parameter = rest.removeprefix("state.")
    while parameter := parameter.rpartition(".")[0]:
        for place in (f"{PARAMETERS}.model.{parameter}", f"{PARAMETERS}.{parameter}"):
            if place in shards:
                return shards[place]
    return None
