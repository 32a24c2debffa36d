"""The device that training runs on, and accelerate's part in it."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from holdfast.config import Compute
from holdfast.errors import ConfigError


def choose_cuda(compute: Compute) -> bool:
    """Return whether to train on a GPU.

    Raises:
        ConfigError: the configuration asks for a GPU, and torch sees none.
    """
    use_cuda = torch.cuda.is_available() and compute.device != "cpu"
    if compute.device == "cuda" and not use_cuda:
        raise ConfigError('compute.device = "cuda": torch sees no GPU here', hint='device = "auto" or "cpu"')
    if compute.mixed_precision == "fp16" and not use_cuda:
        raise ConfigError(
            'compute.mixed_precision = "fp16": torch trains in fp16 on a GPU only, and this is a CPU',
            hint='mixed_precision = "bf16" or "no"',
        )
    return use_cuda


def make_accelerator(compute: Compute, grad_accum: int, *, use_cuda: bool) -> Accelerator:
    """Return accelerate's accelerator. It doesn't touch the data: `holdfast.data` makes the micro-batches."""
    return Accelerator(
        cpu=not use_cuda,
        mixed_precision=compute.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=grad_accum, sync_with_dataloader=False),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
