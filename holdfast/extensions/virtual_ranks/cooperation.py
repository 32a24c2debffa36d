"""The virtual ranks of a configuration, and the programs that they can't train."""

from accelerate import Accelerator
from torch import nn

from holdfast.config import RunConfig
from holdfast.data import is_stream, list_batch_sizes, list_divisors
from holdfast.errors import ConfigError
from holdfast.extensions.virtual_ranks.step import VirtualRanks
from holdfast.recipe import Recipe
from holdfast.training.data_ranks import DataRanks
from holdfast.training.optimizers import list_stepped
from holdfast.training.sharded.model import is_cut, list_fsdp_modules


def make_virtual(
    config: RunConfig, recipe: Recipe, accelerator: Accelerator, data: DataRanks | None = None
) -> VirtualRanks:
    """Return the `VirtualRanks` that the configuration asks for.

    Args:
        data: the data ranks, if some ranks train the same samples.

    Raises:
        ConfigError: virtual ranks can't train this program, or there are more data ranks than virtual ranks.
    """
    shares, sizes = config.compute.virtual_ranks, _list_sizes(recipe)
    uneven = next((size for size in sizes if size % shares), 0)
    if recipe.loss is None and not recipe.has_own_loop:
        problem, hint = "with Recipe(step=...)", "return a Recipe with a loss, or leave virtual_ranks out"
    elif not sizes:
        problem, hint = "this data, which can't be divided into shares", _HINTS[recipe.has_own_loop]
    elif uneven and uneven == sizes[0]:
        hint = f"set a number of virtual ranks that divides {uneven}: {list_divisors(uneven)}"
        problem = f"a batch of {uneven} samples in equal shares"
    elif uneven:
        problem = f"a pass's last batch of {uneven} samples in equal shares"
        hint = "set drop_last=True, which leaves this batch out"
    elif recipe.batch_size is None and recipe.grad_accum > 1:
        problem, hint = "several batches of a loader in a step", "set grad_accum = 1 and a larger batch_size"
    elif config.compute.mixed_precision == "fp16":
        problem, hint = "in fp16, which scales the gradient", 'set mixed_precision = "bf16"'
    elif not _trains_model_alone(recipe):
        problem, hint = "modules besides Recipe(model=...)", "put all modules that learn into Recipe(model=...)"
    elif layers := [name for name, each in recipe.model.named_modules() if isinstance(each, nn.SyncBatchNorm)]:
        problem = f"{layers[0]}, a SyncBatchNorm, which sums over the ranks in each forward pass"
        hint = "leave convert_sync_batchnorm out: each share then has its own batch statistics"
    else:
        cut = bool(list_fsdp_modules(recipe.model)) if recipe.has_own_loop else is_cut(config, accelerator)
        return VirtualRanks(shares, accelerator, config.seed, data, is_cut=cut)
    raise ConfigError(f"compute.virtual_ranks = {shares}: virtual ranks can't train {problem}", hint=hint)


# The hint for data that can't be cut into shares: for a recipe (False), and for the user's own loop (True).
_HINTS = {
    False: "use map-style data with a batch_size, or a DataLoader over it",
    True: "use run.batches(dataset, batch_size=...) or run.steps(loader), of a map-style dataset, and step.shares()",
}


def _list_sizes(recipe: Recipe) -> list[int]:
    """Return the distinct sizes of the batches to cut into shares. A loader's last batch may be smaller than others.

    The list is empty for a stream, which isn't cut, and for a loader whose batch sizes aren't known.
    """
    if recipe.batch_size is None:
        return list_batch_sizes(recipe.data)
    return [] if is_stream(recipe.data) else [recipe.batch_size]


def _trains_model_alone(recipe: Recipe) -> bool:
    """Return whether the recipe's optimizers step only the model's parameters, and no extra is trained with them."""
    own = {id(each) for each in recipe.model.parameters()}
    return not recipe.synchronized and all(id(each) in own for each in list_stepped(recipe.optimizer))
