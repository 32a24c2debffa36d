"""The placement of a model's tensors: on their device, and in shards if the configuration asks for it.

The code of shards is imported only for shards, and for a model that was built on the meta device.
"""

import pkgutil

from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.config import RunConfig
from holdfast.recipe import Recipe
from holdfast.training.data_ranks import DataRanks

MODEL = "holdfast.training.sharded.model"


def check_divided(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> None:
    """Raise ConfigError if the configuration shards the model, and the program's model isn't or can't be sharded."""
    if config.compute.parallel == "fsdp":
        pkgutil.resolve_name(f"{MODEL}:check_sharding")(config, recipe, accelerator)


def find_data_groups(config: RunConfig, accelerator: Accelerator) -> DataRanks | None:
    """Return the groups of ranks that train the same samples, as `compute.mesh` sets them; None if there are none."""
    if config.compute.parallel != "fsdp":
        return None
    groups: DataRanks | None = pkgutil.resolve_name(f"{MODEL}:find_data_ranks")(config, accelerator)
    return groups


def place_modules(config: RunConfig, recipe: Recipe, accelerator: Accelerator) -> None:
    """Allocate memory for a model on the meta device, and shard the model if the configuration asks for it."""
    models: list[nn.Module] = [
        recipe.model,
        *(each for each in recipe.extras.values() if isinstance(each, AveragedModel)),
    ]
    is_meta = any(tensor.is_meta for each in models for tensor in (*each.parameters(), *each.buffers()))
    if is_meta or config.compute.parallel == "fsdp":
        pkgutil.resolve_name(f"{MODEL}:place_model")(config, recipe, accelerator)
