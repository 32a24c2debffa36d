"""The clipping of a gradient of which each rank has a region, or a stage of a pipeline."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from holdfast.state import gather_whole
from holdfast.training.gradient_norm import take_local_norm
from holdfast.training.sharded.stages import Stages


def clip_regions(accelerator: Accelerator, stages: Stages | None, parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scale the gradient down to a norm of at most ``limit``. Return the norm before scaling. All ranks call it."""
    if stages is not None:
        return _clip_stages(accelerator, stages, parameters, limit)
    groups = _group_by_mesh(parameters)
    if len(groups) == 1 and limit < math.inf:
        norm: Tensor = accelerator.clip_grad_norm_(parameters, limit)
        return gather_whole(norm)
    # Don't call torch's clipping with an infinite limit; see `SeparateRanks.clip`.
    accelerator.unscale_gradients()
    return take_local_norm(parameters) if len(groups) == 1 else _clip_on_meshes(groups, limit)


def _clip_on_meshes(groups: Sequence[Sequence[Tensor]], limit: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack([take_local_norm(group) for group in groups]))
    for group in groups if limit < math.inf else ():
        nn.utils.clip_grads_with_norm_(group, limit, norm)
    return norm


def _clip_stages(accelerator: Accelerator, stages: Stages, parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Clip by the norm of the whole pipeline's gradient, and return this norm. All ranks call it together."""
    accelerator.unscale_gradients()
    own = take_local_norm(each for each in parameters if id(each) not in stages.repeated)
    norms = accelerator.gather(own.to(accelerator.device, torch.float32).reshape(1))
    norm: Tensor = torch.linalg.vector_norm(norms[stages.pipeline])
    if limit < math.inf:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def _group_by_mesh(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the parameters that have a gradient, grouped by mesh: torch can't combine tensors of different meshes.

    With tensor parallelism there are several meshes: layers outside the plan are only on the data-parallel mesh.
    """
    groups: dict[Any, list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            groups.setdefault(getattr(each.grad, "device_mesh", None), []).append(each)
    return [*groups.values()]
