"""A GPU that is not there: its tensors know only their device, shape and dtype, and operations refuse a mixture.

torch's fake tensors check devices as a GPU does. The ranks are those of torch's fake process group, in which a
collective does nothing. Here it takes the GPU's tensors alone, as NCCL does.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.state import PartialState
from torch import Tensor, distributed, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from holdfast.config import Compute, Determinism, RunConfig
from holdfast.recipe.function import build_recipe
from holdfast.training import Training, evaluate_recipe, loop, passes, recording
from holdfast.training.devices import prepare_device
from holdfast.training.program import RecipeProgram
from holdfast.training.recording import record_step

# A kind of device for which no build of torch has a library: one for the CPU refuses to index tensors of "cuda".
GPU = torch.device("lazy", 0)


class Pretended(FakeTensorMode):
    """The mode in which tensors have no numbers. Each number that is read from one is 1."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation; raise if its tensors are on several devices, or a collective's not on the GPU."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func.namespace == "c10d":
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            assert all(each.device == GPU for each in tensors), f"{func} of {tensors}"
        return super().dispatch(func, types, args, kwargs)


class OnGpu(Training):
    """A training on the GPU that isn't there."""

    def gather(self, value: Any) -> list[Any]:
        """Return this rank's value for each rank."""
        return [value] * self.accelerator.num_processes

    def next_batch(self, *, is_moved: bool = True) -> tuple[str, Any]:
        """Return the first samples on the GPU: a loader's names are made of numbers."""
        data: Any = self.recipe.data
        size = (self.recipe.batch_size or 0) // (self.config.compute.virtual_ranks or self.config.compute.rank_count)
        return "samples", [each.to(GPU) for each in default_collate([data[number] for number in range(size)])]


def train(recipe: str, ranks: int, shares: int) -> int:
    """Train two steps of a recipe as the last one of some ranks, the second in detail, and evaluate. Return 0.

    Args:
        shares: the number of virtual ranks; 0 for none.
    """
    _patch_torch()
    if ranks > 1:
        os.environ.update(RANK=str(ranks - 1), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", OMP_NUM_THREADS="1")
        distributed.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    config = RunConfig(
        recipe=recipe, run="r", determinism=Determinism(mode="fast"),
        compute=Compute(device="cpu", ranks=ranks, virtual_ranks=shares),
    )  # fmt: skip
    accelerator = prepare_device(config)
    accelerator.state.device = PartialState().device = GPU
    with Pretended(allow_non_fake_inputs=True):
        training = OnGpu(config, RecipeProgram(accelerator, *build_recipe(config.recipe, config.settings, GPU)))
        assert {each.device for each in training.model.parameters()} == {GPU}
        for is_detailed in (False, True):
            training.record.is_detailed = is_detailed
            with training.generators.training():
                training.record.trained = loop.train_step(training)
            record_step(training)
        evaluate_recipe(training)
        assert [*recording._read_numbers(training)] == [1.0] * 4, "the loss and the norm of each step"
    return 0


def _patch_torch() -> None:
    """Let this process copy, move and read tensors without numbers."""
    nn.Module.to = _move  # type: ignore[method-assign, assignment]
    Tensor.__deepcopy__ = nn.Parameter.__deepcopy__ = _copy  # type: ignore[method-assign, assignment]
    torch.accelerator.synchronize = lambda *_: None  # nothing is queued
    FakeTensor.tolist = lambda self: _to_ones(self.shape, 1.0 if self.dtype.is_floating_point else 1)
    passes._sum_extras = lambda training: {}  # which finds tied tensors by their address, and these have none


def _move(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module as torch does from a CPU to a GPU: its parameters stay the same objects."""
    for parameter in module.parameters():
        parameter.fake_device = device  # type: ignore[attr-defined]
    for each in module.modules():
        each._buffers.update({name: buffer.to(device) for name, buffer in each._buffers.items() if buffer is not None})
    return module


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    return memo[id(tensor)]


def _to_ones(shape: Iterable[int], one: float) -> Any:
    size, *rest = [*shape] or [0]
    return [_to_ones(rest, one) if rest else one for _ in range(size)] if [*shape] else one
