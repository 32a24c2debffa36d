"""The check of a model's layout: virtual ranks have to be able to sum its gradients in a fixed order."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from holdfast.errors import RecipeError
from holdfast.state import is_sharded
from holdfast.training.data_ranks import HINT, DataRanks, find_grid, has_plan
from holdfast.training.fsdp_modules import list_fsdp_modules

ORDER_HINT = (
    "build the mesh with init_device_mesh(...), which keeps the order, and pass fully_shard all of its data-parallel "
    "dimensions, but no other dimension"
)


def check_order(data: DataRanks) -> None:
    """Raise RecipeError unless the data ranks are in the order of the ranks: shares are assigned in this order."""
    for peers in data.meshes:
        if list(peers) != sorted(peers):
            raise RecipeError(
                "virtual ranks need a mesh whose data ranks are in ascending order, but found the ranks "
                f"{_join(peers)}",
                hint=ORDER_HINT,
            )


def check_one_model(names: Sequence[Sequence[str]]) -> None:
    """Raise RecipeError if the names of the ranks' parameters differ, as in the stages of a pipeline.

    Args:
        names: the names of the parameters, by rank.
    """
    for rank, each in enumerate(names):
        if each != names[0]:
            differing = [name for name in (*names[0], *each) if (name in each) != (name in names[0])]
            raise RecipeError(
                f"virtual ranks can't train the stages of a pipeline: rank {rank} has different "
                "parameters than rank 0: "
                f"{', '.join([*differing, 'the same in a different order'][:1])}",
                hint="set compute.virtual_ranks = 0",
            )


def check_layout(models: Sequence[nn.Module], data: DataRanks, *, is_cut: bool, is_grouped: bool) -> None:
    """Raise RecipeError if a model is sharded in a way in which a sum's order depends on the number of data ranks.

    Args:
        is_cut: whether FSDP2 shards the models over the data ranks.
        is_grouped: whether several ranks train the same samples, as with tensor parallelism.
    """
    for model in models:
        modules = list_fsdp_modules(model)
        gathered = {id(each) for module in modules for each in module.parameters()}
        for name, each in model.named_parameters():
            if each.requires_grad:
                _check_parameter(name, each, data, is_cut=is_cut, is_gathered=id(each) in gathered)
        if not is_grouped:
            _check_precision(modules)


def _check_parameter(name: str, parameter: Any, data: DataRanks, *, is_cut: bool, is_gathered: bool) -> None:
    if is_cut and not is_gathered:
        raise RecipeError(
            f"virtual ranks can't train {name!r}: FSDP2 shards the model, but not this parameter",
            hint="end your function parallelize with fully_shard(model, ...), which shards the remaining parameters",
        )
    if not is_gathered:
        ranks = parameter.device_mesh.mesh.flatten().tolist() if is_sharded(parameter) else []
        if len({data.numbers[each] for each in ranks}) > 1:
            raise RecipeError(
                f"ranks {_join(ranks)} hold pieces of the tensor {name!r} and compute with it together, so they need "
                "the same samples, but virtual ranks would give them different samples",
                hint=HINT,
            )
        return
    ranks, placement = find_grid(parameter).flatten().tolist(), parameter.placements[-2 if has_plan(parameter) else -1]
    if tuple(ranks) != data.peers:
        raise RecipeError(
            f"FSDP2 averages the gradient of {name!r} over the ranks {_join(ranks)}, but the data ranks are "
            f"{_join(data.peers)}: virtual ranks need the same ranks in the same order",
            hint=ORDER_HINT,
        )
    if placement.dim:
        raise RecipeError(
            f"virtual ranks can't train {name!r}: FSDP2 cuts its dimension {placement.dim} over the data ranks, so "
            "the norm of its gradient would depend on their number",
            hint="call fully_shard without shard_placement_fn: it then cuts dimension 0",
        )


def _check_precision(modules: Sequence[Any]) -> None:
    """Raise RecipeError if FSDP2 has its own precision: a single rank, without FSDP2, would get different bits."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policies = [each._get_fsdp_state()._mp_policy for each in modules]
    if found := next((each for each in policies if each != MixedPrecisionPolicy()), None):
        raise RecipeError(
            f"virtual ranks can't train with {found}: a single rank trains without fully_shard, "
            "and gets different bits",
            hint='use compute.mixed_precision = "bf16" instead',
        )


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
