"""The unsynced gradients of FSDP2: not yet summed over the ranks, because the loop doesn't sync them in every step.

After ``model.set_requires_gradient_sync(False)`` torch keeps each rank's whole gradient in a private attribute, and not
in ``grad``. Each rank has a different gradient, so a checkpoint contains them as one sharded tensor: its first
dimensions are those of the mesh, and each rank holds its own gradient.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import RecipeError, StateError
from holdfast.state import is_sharded, local_of

# FSDP2's private attributes: the unsynced gradient, if its dtype differs from the parameter's or after a restore; and
# the gathered parameter.
SUM, GATHERED = "unsharded_accumulated_grad", "_unsharded_param"


def capture_unsynced(model: nn.Module) -> dict[str, Any]:
    """Return the unsynced gradients by the parameter's name, each as a sharded tensor.

    Raises:
        RecipeError: a gradient can't be saved.
    """
    found = {}
    for name, each in _list_parameters(model):
        gradient = getattr(each, SUM)
        if gradient is None:
            gradient = getattr(getattr(each, GATHERED, None), "grad", None)
        if gradient is not None:
            found[name] = _stack(name, gradient, each.sharded_param)
    return found


def restore_unsynced(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore the gradients that `capture_unsynced` returned. Delete the unsynced gradients of all other parameters.

    Raises:
        StateError: the gradients were saved by a different number of ranks, or a parameter is no longer sharded.
    """
    own = dict(_list_parameters(model))
    for name in saved.keys() - own.keys():
        raise _unfit(name, "the model isn't sharded by fully_shard now")
    for name, each in own.items():
        if (gathered := getattr(each, GATHERED, None)) is not None:
            gathered.grad = None
        value = saved.get(name)
        if value is not None and (not is_sharded(value) or value.shape != like_stack(each.sharded_param).shape):
            raise _unfit(name, "a different number of ranks has saved the checkpoint")
        setattr(each, SUM, value if value is None else local_of(value).reshape(each.sharded_param.shape))


def like_stack(parameter: Any) -> Any:
    """Return a sharded tensor without memory, with the layout of a parameter's unsynced gradient in a checkpoint."""
    mesh = parameter.device_mesh
    local = torch.empty((), device=parameter.device).expand((1,) * mesh.ndim + parameter.shape)
    return _shard_by_ranks(local, parameter)


def _stack(name: str, gradient: Tensor, parameter: Any) -> Any:
    if is_sharded(gradient) or parameter.device_mesh.size() != torch.distributed.get_world_size():
        raise RecipeError(
            f"a checkpoint can't contain the unsynced gradient of {name}, because its mesh has dimensions besides the "
            "data-parallel ones, or lacks some of the ranks",
            hint="let each step end with synced gradients: model.set_requires_gradient_sync(True); accumulate "
            "gradients only inside a step",
        )
    return _shard_by_ranks(gradient.detach()[(None,) * parameter.device_mesh.ndim], parameter)


def _shard_by_ranks(local: Tensor, parameter: Any) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    mesh = parameter.device_mesh
    shape = (*mesh.shape, *local.shape[mesh.ndim :])
    stride = torch.empty(shape, device="meta").stride()
    places = [Shard(each) for each in range(mesh.ndim)]
    return DTensor.from_local(local, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride)


def _list_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield FSDP2's records of the sharded parameters, by the parameter's name."""
    # FSDP2 gives each module that it shards a class with this method.
    modules = [each for each in model.modules() if hasattr(type(each), "_get_fsdp_state")]
    names = {id(parameter): name for name, parameter in model.named_parameters()} if modules else {}
    for module in modules:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.13 has one group
        for group in [state._fsdp_param_group] if groups is None else groups:
            for each in group.fsdp_params if group is not None else ():
                if id(each.sharded_param) in names:
                    yield names[id(each.sharded_param)], each


def _unfit(name: str, reason: str) -> StateError:
    return StateError(
        f"the checkpoint has a gradient of {name} that each rank keeps for the next step: {reason}",
        hint="continue with the number of ranks, and with the mesh, that saved the checkpoint",
    )
