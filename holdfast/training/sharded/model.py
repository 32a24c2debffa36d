"""A model that torch's `fully_shard` (FSDP2) shards over the ranks: `compute.parallel = "fsdp"`."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.config import RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe import Recipe
from holdfast.state import is_sharded
from holdfast.state.layout import share_tensor
from holdfast.training.optimizers import parts_of

SETTING = 'compute.parallel = "fsdp"'


def check_sharding(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> None:
    """Raise ConfigError if the configuration asks for a sharded model and this program can't have one, or has none."""
    if config.compute.parallel != "fsdp":
        return
    if recipe.has_own_loop:
        if is_cut(config, accelerator) and not any(map(is_sharded, recipe.model.parameters())):
            hint = "model = run.wrap(model) before the optimizer is built"
            raise ConfigError(f"{SETTING}: the loop has sharded no model over the ranks", hint=hint)
    elif recipe.loss is None:
        raise _can_not_shard("a step of its own", "return a Recipe with a loss")
    if config.compute.mixed_precision == "fp16":
        raise _can_not_shard("fp16, whose GradScaler sees a shard of the gradient", 'mixed_precision = "bf16"')


def _can_not_shard(problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{SETTING}: the engine can't shard {problem}", hint=hint)


def is_cut(config: RunConfig, accelerator: Accelerator) -> bool:
    """Return whether the model is sharded over the ranks. A single rank holds the whole model."""
    return config.compute.parallel == "fsdp" and accelerator.num_processes > 1


def place_model(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> None:
    """Move the recipe's model to its device and shard it; see `cut_model`. The optimizers then step the shards.

    An `AveragedModel` among the extras is treated alike, because it is updated from the model's shards.
    """
    averages = [each.module for each in recipe.extras.values() if isinstance(each, AveragedModel)]
    before = dict(recipe.model.named_parameters(remove_duplicate=False))
    for model in (recipe.model, *averages):
        cut_model(config, model, accelerator)
    after = dict(recipe.model.named_parameters(remove_duplicate=False))
    _replace(recipe, {id(each): after[name] for name, each in before.items() if after[name] is not each})


def cut_model(config: RunConfig, model: nn.Module, accelerator: Accelerator) -> None:
    """Allocate a model's meta tensors, and shard the model over the ranks.

    The model is sharded if `compute.parallel` is "fsdp" and there are several ranks. `list_blocks` chooses the blocks.
    Each block is gathered only for its own forward and backward pass. A rank never holds more than one whole block of a
    model that was built on the meta device.

    Raises:
        RecipeError: the model is on the meta device, and a module has no ``reset_parameters``.
    """
    made: dict[int, nn.Parameter] = {}
    for block in list_blocks(model):
        materialize(block, accelerator.device, made)
        if is_cut(config, accelerator):
            _cut_block(block, accelerator)


def materialize(model: nn.Module, place: torch.device, made: dict[int, nn.Parameter]) -> None:
    """Allocate and initialize all parameters and buffers of a model that are on the meta device.

    The modules' ``reset_parameters`` set the values, in the order of ``modules()``, as when torch builds them.

    Args:
        place: the device for the memory.
        made: the parameters that stand for those on the meta device, by the id of the latter; tied ones stay tied.

    Raises:
        RecipeError: a module with such parameters or buffers has no ``reset_parameters``.
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
                hint="give it a method reset_parameters(), which sets its parameters and buffers",
            )
        for key, parameter in parameters.items():
            if id(parameter) not in made:
                memory = torch.empty_like(parameter.detach(), device=place)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
        for key, buffer in buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device=place)
        reset()


def _cut_block(block: nn.Module, accelerator: Accelerator) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # the import takes 1.3 s
    from torch.distributed.fsdp import fully_shard

    for tensor in (*block.parameters(), *block.buffers()):
        if not is_sharded(tensor):
            tensor.data = tensor.data.to(accelerator.device)
            share_tensor(tensor)  # as DDP does it: a recipe may build other weights in a rank
    # Shards are what optimizers and checkpoints find in the model, also between a forward pass and a step.
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    fully_shard(block, mesh=mesh, reshard_after_forward=True)


def list_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose parameters are gathered together: each item of every `ModuleList`, then the model.

    Inner blocks come before outer ones, as `fully_shard` needs it.
    """
    lists = (module for module in reversed(list(model.modules())) if isinstance(module, nn.ModuleList))
    items = {id(item): item for each in lists for item in reversed(list(each))}
    for item in items.values():
        is_container = isinstance(item, nn.ModuleList | nn.ModuleDict)
        if item is not model and not is_container and any(True for _ in item.parameters()):
            yield item
    yield model


def _replace(recipe: Recipe, shards: dict[int, nn.Parameter]) -> None:
    """Replace the parameters in the recipe's optimizers by their shards, and move the optimizers' state to the shards.

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
    """Return an optimizer's state of a parameter, sharded like the parameter. (Adagrad has state from the start.)"""
    from torch.distributed.tensor import distribute_tensor

    return {
        name: distribute_tensor(value, shard.device_mesh, shard.placements)
        if isinstance(value, torch.Tensor) and value.shape == whole.shape
        else value
        for name, value in state.items()
    }
