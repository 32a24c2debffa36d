"""A trial of an optimizer: does its step give each element the same bits if the tensor is cut by rows?

A step on some rows of a tensor may give these rows different bits than a step on the whole tensor. There are two
causes: the step may use whole rows and columns, or its kernel may round the last elements of a tensor differently. On a
CPU the kernels of torch's fused AdamW and fused SGD round them differently: after three steps a third of the moments
have different bits.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast.state import capture_rng, restore_rng
from holdfast.training.optimizers import parts_of

# The shape of a trial's tensor. A row has fewer elements than a vector register. So a step on a single row computes all
# elements in the way in which a kernel computes the last elements of a tensor.
SHAPE = (256, 5)
STEPS = 3
RATE = 1e-3  # used instead of a learning rate of 0, with which a warm-up may begin


def check_elementwise(optimizer: Any, device: torch.device) -> None:
    """Raise ConfigError if an optimizer's step depends on how a tensor is cut by rows, or if this trial fails.

    The optimizer, its state and the random generators stay as they are. Call it before the first step.
    """
    before = capture_rng()
    try:
        for part in parts_of(optimizer):
            for group in part.param_groups:
                for dtype in dict.fromkeys(each.dtype for each in group["params"]):
                    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
                    if not _is_elementwise(part, group, values):
                        raise _refuse(part, dtype)
    finally:
        restore_rng(before)


def _is_elementwise(optimizer: Any, group: dict[str, Any], values: Tensor) -> bool:
    """Return whether steps on a whole tensor, and steps row by row, give the tensor and its moments the same bits."""
    try:
        whole, rows = _step(optimizer, group, values, len(values)), _step(optimizer, group, values, 1)
        return whole.keys() == rows.keys() and all(torch.equal(whole[name], rows[name]) for name in whole)
    except Exception:  # a user's optimizer may raise any error for a tensor of this shape
        return False


def _step(optimizer: Any, group: dict[str, Any], values: Tensor, rows: int) -> dict[str, Tensor]:
    """Step a copy of a tensor in pieces, with an optimizer's code and a group's settings.

    Return the changed tensor, and the tensors of its state, by name.

    Args:
        rows: the number of rows of a piece.
    """
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    vars(trial).pop("step", None)  # drop a scheduler's wrapper of `step`, because it is bound to the real optimizer
    vars(trial).update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={}, state=defaultdict(dict))
    parameters = [torch.nn.Parameter(each.clone()) for each in torch.split(values, rows)]
    trial.param_groups = [copy.deepcopy({**group, "params": []}) | {"params": parameters}]
    trial.param_groups[0]["lr"] = group.get("lr") or RATE
    first = group["params"][0]
    for parameter in parameters:  # give each row a state like that of ``first``: Adagrad needs it before its first step
        for name, value in optimizer.state.get(first, {}).items():
            is_like = isinstance(value, Tensor) and value.shape == first.shape
            made = torch.full_like(parameter, value.flatten()[0].item()) if is_like else copy.deepcopy(value)
            trial.state[parameter][name] = made
    for number in range(STEPS):
        for parameter, gradient in zip(parameters, torch.split(values.roll(number + 1, 0), rows), strict=True):
            parameter.grad = gradient.clone()
        trial.step()
    found = {"parameter": torch.cat([each.detach() for each in parameters])}
    for name, value in trial.state[parameters[0]].items():
        if isinstance(value, Tensor) and value.dim():
            found[name] = torch.cat([trial.state[each][name] for each in parameters])
    return found


def _refuse(optimizer: Any, dtype: torch.dtype) -> ConfigError:
    name, kind = type(optimizer).__name__, str(dtype).removeprefix("torch.")
    return ConfigError(
        f'compute.parallel = "fsdp": virtual ranks can\'t train with {name} here: a step on rows of a {kind} tensor '
        "gives different bits than a step on the whole tensor",
        hint=f'use {name} without fused=True, a different optimizer such as AdamW, or compute.parallel = "ddp"',
    )
