"""A model that is sharded over the ranks by torch's `fully_shard` (FSDP2), as `compute.parallel = "fsdp"` asks for.

A recipe may also have its own function that shards the model, by any of torch's plans, over the mesh of `compute.mesh`.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.checkpoint import shorten
from holdfast.config import RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe import Recipe
from holdfast.state import is_sharded
from holdfast.state.layout import share_tensor
from holdfast.training.data_ranks import DataRanks, gather_data_ranks
from holdfast.training.fsdp_modules import list_fsdp_modules as list_fsdp_modules
from holdfast.training.fsdp_modules import shard_again as shard_again
from holdfast.training.optimizers import parts_of

SETTING = 'compute.parallel = "fsdp"'
DIMENSIONS = ("replicate", "shard", "tensor")
DATA = DIMENSIONS[:2]
SHOWN_NAMES = 3
PARALLELIZE_HINT = (
    "Recipe(parallelize=...) or run.wrap(model, parallelize=...): a function of the model and the mesh that shards it, "
    "by parallelize_module and fully_shard"
)

# A function that shards a model in place, given the model and a mesh.
Parallelize = Callable[[Any, Any], object]


def check_sharding(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> None:
    """Raise ConfigError if `compute.parallel` is "fsdp", and the program's model isn't sharded or can't be sharded."""
    if config.compute.parallel != "fsdp":
        return
    if recipe.has_own_loop:
        if is_cut(config, accelerator) and not any(map(is_sharded, recipe.model.parameters())):
            hint = "call model = run.wrap(model) before you build the optimizer"
            raise ConfigError(f"{SETTING}: the loop has sharded no model over the ranks", hint=hint)
    elif recipe.loss is None:
        raise _can_not_shard("a model with Recipe(step=...)", "return a Recipe with a loss")
    if config.compute.mixed_precision == "fp16":
        raise _can_not_shard("fp16, whose GradScaler sees a shard of the gradient", 'mixed_precision = "bf16"')


def _can_not_shard(problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{SETTING}: Holdfast can't shard {problem}", hint=hint)


def is_cut(config: RunConfig, accelerator: Accelerator) -> bool:
    """Return whether the model is sharded over the ranks. A single rank holds the whole model."""
    return config.compute.parallel == "fsdp" and accelerator.num_processes > 1


@functools.cache
def _make_mesh(device: str, sizes: tuple[int, int, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh  # imported here, because the import takes 1.3 s

    return init_device_mesh(device, sizes, mesh_dim_names=DIMENSIONS)


def find_mesh(config: RunConfig, accelerator: Accelerator) -> Any:
    """Return the ranks as a ``DeviceMesh`` with the dimensions `DIMENSIONS`; None if no model is sharded.

    All ranks make the first call together.

    Raises:
        ConfigError: the configuration's mesh doesn't have as many ranks as the run.
    """
    if not is_cut(config, accelerator):
        return None
    shape, ranks = config.compute.mesh, int(accelerator.num_processes)
    if shape is not None and shape.size != ranks:
        raise ConfigError(
            f"compute.mesh = {shape.replicate} x {shape.shard} x {shape.tensor} doesn't match the run's {ranks} ranks",
            hint="make replicate x shard x tensor equal to the number of ranks on all nodes",
        )
    sizes = (shape.replicate, shape.shard, shape.tensor) if shape else (1, ranks, 1)
    return _make_mesh(accelerator.device.type, sizes)


def find_data_ranks(config: RunConfig, accelerator: Accelerator) -> DataRanks | None:
    """Return the groups of ranks that train the same samples, as `compute.mesh` sets them.

    Return None if each rank trains different samples.
    """
    mesh = find_mesh(config, accelerator)
    if mesh is None or mesh["tensor"].size() == 1:
        return None
    return gather_data_ranks(mesh[DATA], accelerator)


def place_model(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> None:
    """Move the recipe's model to its device and shard it; see `cut_model`. The optimizers then step the shards.

    An `AveragedModel` among the extras is sharded, too, because it is updated from the model's shards.
    """
    averages = [each.module for each in recipe.extras.values() if isinstance(each, AveragedModel)]
    before = dict(recipe.model.named_parameters(remove_duplicate=False))
    for model in (recipe.model, *averages):
        cut_model(config, model, accelerator, recipe.parallelize)
    _replace(recipe, match_parameters(before, recipe.model))


def match_parameters(before: Mapping[str, nn.Parameter], model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the parameters that have replaced a model's original parameters, by the ids of the originals.

    Parameters are matched by order and not by name, because a wrapper such as ``checkpoint_wrapper`` changes the names.

    Args:
        before: the original parameters, by name. A tied parameter is listed under each of its names.

    Raises:
        ConfigError: the shapes of parameters have changed, or tied parameters are no longer tied.
    """
    after = list(model.named_parameters(remove_duplicate=False))
    if [each.shape for each in before.values()] != [each.shape for _, each in after]:
        raise ConfigError(
            "the function parallelize has given the model different parameters",
            hint="change the model in the function that builds it; parallelize only shards it",
        )
    found: dict[int, nn.Parameter] = {}
    for whole, (name, shard) in zip(before.values(), after, strict=True):
        if found.setdefault(id(whole), shard) is not shard:
            tied = [known for known, each in before.items() if each is whole]
            first, names = tied[0], " and ".join(tied)
            raise ConfigError(
                f"the function parallelize has untied {names}: each would be trained as a separate parameter",
                hint=f"after parallelize_module, tie the parameters again: assign the parameter {first} to {name}",
            )
    return {key: each for key, each in found.items() if id(each) != key}


def cut_model(
    config: RunConfig, model: nn.Module, accelerator: Accelerator, parallelize: Parallelize | None = None
) -> None:
    """Shard a model over the ranks. Allocate memory for tensors on the meta device.

    The model is sharded if `compute.parallel` is "fsdp" and there are several ranks. `list_blocks` chooses the blocks.
    A block's parameters are gathered only for its own forward and backward pass. If the model was built on the meta
    device, a rank never holds more than one whole block.

    Args:
        parallelize: a function, called with the model and the mesh, that shards the whole model in place, instead of
            block by block.

    Raises:
        RecipeError: the model is on the meta device, and a module has no ``reset_parameters``.
        ConfigError: the mesh has a tensor dimension, and there is no ``parallelize``; or ``parallelize`` doesn't shard
            the whole model.
    """
    made: dict[int, nn.Parameter] = {}
    mesh = find_mesh(config, accelerator)
    if mesh is not None and parallelize is not None:
        materialize(model, accelerator.device, made)
        _share_tensors(model, accelerator)
        _cut_by(parallelize, model, mesh)
        return
    if mesh is not None and mesh["tensor"].size() > 1:
        raise _can_not_shard("layers over mesh.tensor by itself", PARALLELIZE_HINT)
    for block in list_blocks(model):
        materialize(block, accelerator.device, made)
        if mesh is not None:
            _cut_block(block, accelerator, mesh)


def _cut_by(parallelize: Parallelize, model: nn.Module, mesh: Any) -> None:
    """Let a function of the user's shard a whole model; see `cut_model`."""
    from torch.distributed.fsdp import FSDPModule

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Parallelize plan key")
        try:
            parallelize(model, mesh)
        except UserWarning as warning:
            # torch's own message would print the whole module
            problem = re.sub(r"(?s) on module.*|:.*", "", str(warning))
            raise ConfigError(f"parallelize: {problem}", hint="the plan needs names of model.named_modules()") from None
    if whole := list_whole(model):
        raise ConfigError(
            f"the function parallelize has left {shorten(whole, SHOWN_NAMES)} unsharded: nothing would average its "
            "gradient",
            hint='call fully_shard(model, mesh=mesh["replicate", "shard"]) at its end, which shards the remaining '
            "parameters",
        )
    # By default FSDP2 doesn't shard the outermost module again after a forward pass. Shard it again each time, because
    # a probe (see `Recipe`) runs forward passes without a backward pass.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(True, recurse=False)


def list_whole(model: nn.Module) -> list[str]:
    """Return the names of a model's trainable parameters that aren't sharded."""
    return [name for name, each in model.named_parameters() if each.requires_grad and not is_sharded(each)]


def materialize(model: nn.Module, place: torch.device, made: dict[int, nn.Parameter]) -> None:
    """Allocate and initialize those parameters and buffers of a model that are on the meta device.

    The modules' ``reset_parameters`` set the values, in the order of ``modules()``, as in a model that is built
    normally.

    Args:
        place: the device for the memory.
        made: the new parameters, by the ids of the meta parameters that they replace. This call adds the parameters
            that it allocates. If a tied parameter is in this dict already, this call doesn't allocate it again.

    Raises:
        RecipeError: a module with parameters or buffers on the meta device has no ``reset_parameters``.
    """
    for name, module in model.named_modules():
        parameters = {key: each for key, each in module._parameters.items() if each is not None and each.is_meta}
        buffers = {key: each for key, each in module._buffers.items() if each is not None and each.is_meta}
        if not parameters and not buffers:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise RecipeError(
                f"the model's {name or 'own tensors'} ({type(module).__qualname__}) has no values: it was built on the "
                "meta device and has no reset_parameters()",
                hint="give it a method reset_parameters(), which sets the module's parameters and buffers",
            )
        for key, parameter in parameters.items():
            if id(parameter) not in made:
                memory = torch.empty_like(parameter.detach(), device=place)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
        for key, buffer in buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device=place)
        reset()


def _share_tensors(model: nn.Module, accelerator: Accelerator) -> None:
    """Move tensors that aren't sharded yet to the device. Copy the main rank's values to all ranks, as DDP does."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_sharded(tensor):
            tensor.data = tensor.data.to(accelerator.device)
            share_tensor(tensor)  # a recipe may build different weights in each rank


def _cut_block(block: nn.Module, accelerator: Accelerator, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    _share_tensors(block, accelerator)
    # Shard again after each forward pass, so that optimizers and checkpoints always find shards in the model.
    parts = mesh[DATA] if mesh["replicate"].size() > 1 else mesh["shard"]
    fully_shard(block, mesh=parts, reshard_after_forward=True)


def list_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model's blocks: the modules whose parameters FSDP2 gathers together.

    Each item of every `ModuleList` is a block, and so is the model, which comes last. Inner blocks come before outer
    blocks, because `fully_shard` needs this order.
    """
    lists = (module for module in reversed(list(model.modules())) if isinstance(module, nn.ModuleList))
    items = {id(item): item for each in lists for item in reversed(list(each))}
    for item in items.values():
        is_container = isinstance(item, nn.ModuleList | nn.ModuleDict)
        if item is not model and not is_container and any(True for _ in item.parameters()):
            yield item
    yield model


def _replace(recipe: Recipe, shards: dict[int, nn.Parameter]) -> None:
    """Replace the parameters in the recipe's optimizers by their shards, and shard the optimizers' state likewise.

    Args:
        shards: the sharded parameters, by the id of the whole parameter.
    """
    for optimizer in parts_of(recipe.optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if is_sharded(shards.get(id(parameter))) and parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    optimizer.state[shards[id(parameter)]] = _cut(state, parameter, shards[id(parameter)])
            group["params"] = [shards.get(id(each), each) for each in group["params"]]


def _cut(state: dict[str, Any], whole: nn.Parameter, shard: Any) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, with each tensor sharded as the parameter is.

    This is needed because some optimizers, such as Adagrad, have a state before the first step.
    """
    from torch.distributed.tensor import distribute_tensor

    return {
        name: distribute_tensor(value, shard.device_mesh, shard.placements)
        if isinstance(value, torch.Tensor) and value.shape == whole.shape
        else value
        for name, value in state.items()
    }
