"""The device that training runs on, and the accelerator from accelerate that prepares it."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import distributed, nn
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from holdfast.config import Compute, RunConfig
from holdfast.errors import ConfigError, GpuUnhealthy
from holdfast.machine import determinism
from holdfast.machine.gpus.checks import describe_unseen, too_few_gpus
from holdfast.machine.processes import MARK_VARIABLE, MEETING_VARIABLE
from holdfast.state import include_gpus, is_sharded
from holdfast.terminal import counted
from holdfast.training.objects import PATIENCE, be_patient

# The options of DistributedDataParallel that a resumed run needs to end on the same bits, for any loop.
DDP_OPTIONS = {
    # With other values of the next two options, DDP rearranges its buckets after a process's first step. If more than
    # two ranks sum in a ring, an element's place in its bucket decides in which order the ranks' values are summed. DDP
    # has to find unused parameters, because a step may not use all parameters.
    "find_unused_parameters": True,
    "static_graph": False,
    # DDP divides a gradient that is a view of its bucket by the number of ranks, and multiplies any other gradient by
    # the inverse, which may round differently. A gradient that the loop keeps for the next step would be a view before
    # a resume, but not after the resume.
    "gradient_as_bucket_view": False,
}


def choose_cuda(compute: Compute) -> bool:
    """Return whether to train on a GPU.

    Raises:
        ConfigError: the configuration asks for a GPU, and torch sees none; or for more GPUs than torch sees.
        GpuUnhealthy: torch can't use this machine's GPUs. Another machine may train.
    """
    use_cuda = torch.cuda.is_available() and compute.device != "cpu"
    if not use_cuda and compute.device != "cpu":
        _refuse_unseen(compute)
    if compute.device == "cuda" and not use_cuda:
        raise ConfigError('compute.device = "cuda": torch sees no GPU here', hint='set device = "auto" or "cpu"')
    # A rank that a launcher such as torchrun has started may see only its own GPU, so don't count the GPUs then.
    if use_cuda and torch.cuda.device_count() < compute.rank_count and not compute.is_attached:
        raise too_few_gpus(compute.rank_count, f"torch sees {counted(torch.cuda.device_count(), 'GPU')} here")
    if compute.mixed_precision == "fp16" and not use_cuda:
        raise ConfigError(
            'compute.mixed_precision = "fp16": torch trains in fp16 on a GPU only, and this is a CPU',
            hint='set mixed_precision = "bf16" or "no"',
        )
    return use_cuda


def _refuse_unseen(compute: Compute) -> None:
    """Raise GpuUnhealthy if this machine has GPUs that torch can't use.

    A run that continued on the CPU would train different bits, at a hundredth of the speed.
    """
    may_use_cpu = compute.device == "auto" and compute.gpu_health == "warn"
    is_wrong_build = compute.device == "cuda" and not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if may_use_cpu or is_wrong_build or not (known := describe_unseen()):
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch sees none"
    except Exception as error:  # torch raises AssertionError in a build for the CPU, and RuntimeError elsewhere
        reason = f"torch sees none: {str(error).splitlines()[0]}"
    raise GpuUnhealthy(
        f"{known}, but {reason}",
        hint='repair the driver or install torch for CUDA, or continue on another machine; compute.device = "cpu" '
        "trains on the CPU",
    )


def prepare_device(config: RunConfig) -> Accelerator:
    """Make this process deterministic, seed it, and return accelerate's accelerator for it.

    The accelerator doesn't touch the data: `holdfast.data` makes the micro-batches.

    Raises:
        ConfigError: the device that the configuration asks for isn't here.
        DeterminismError: this process can't be deterministic.
    """
    compute = config.compute
    use_cuda = choose_cuda(compute)
    if use_cuda:
        from holdfast.machine.gpus.waits import sleep_in_waits  # a CPU needs no such wait

        sleep_in_waits()
    include_gpus(use_cuda)
    determinism.apply(config.determinism, config.seed)
    be_patient()
    meeting = os.environ.get(MEETING_VARIABLE)
    if meeting and not distributed.is_initialized():
        connect_local(meeting, use_cuda)
    elif compute.is_attached and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        connect_attached(compute, use_cuda)
    accelerator = Accelerator(
        cpu=not use_cuda,
        mixed_precision=compute.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP_OPTIONS), InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    determinism.check(config.determinism, "before the recipe is built")
    return accelerator


def moves_model(accelerator: Accelerator, model: nn.Module) -> bool:
    """Return whether accelerate has to move a model to its device, for its argument ``device_placement``.

    Without this argument accelerate finds out by importing torch's sharded tensors, which takes half a second.
    """
    is_sharded_later = accelerator.distributed_type == DistributedType.FSDP
    is_placed = is_sharded_later or any(map(is_sharded, model.parameters()))
    return bool(accelerator.device_placement) and not is_placed


def connect_local(meeting: str, use_cuda: bool) -> None:
    """Connect the ranks of one machine through a file; see `holdfast.rank.local`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(meeting, size)
    store.set_timeout(PATIENCE)
    distributed.init_process_group(
        "nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE
    )


def connect_attached(compute: Compute, use_cuda: bool) -> None:
    """Connect ranks that a launcher such as torchrun has started, under new keys in the launcher's key-value store.

    torchrun gives its restarted ranks the same store as its first ranks (``--max-restarts``; seen in torch 2.13).
    Without a new prefix for the keys gloo would find the addresses of dead ranks, and try to connect to them.
    """
    # this value is equal in all ranks of one machine, but different on several machines
    prefix = os.environ[MARK_VARIABLE]
    if compute.has_nodes:
        prefix = "/".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"))
    store, rank, size = next(rendezvous("env://"))
    distributed.init_process_group(
        "nccl" if use_cuda else "gloo",
        store=PrefixStore(prefix, store),
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )


def required_of_ddp(ranks: int) -> dict[str, bool]:
    """Return the options that a user's own DistributedDataParallel needs to compute the same bits after a resume.

    With one or two ranks no option is needed: a sum of two numbers doesn't depend on their order, and halving is exact.
    """
    return DDP_OPTIONS if ranks > 2 else {}
