"""The checks before a run takes GPUs: there are enough of them, and they are healthy."""

import logging
import os
import subprocess
from pathlib import Path

from holdfast.config import Compute, RunConfig
from holdfast.errors import ConfigError, GpuUnhealthy
from holdfast.machine.gpus.report import PROGRAM, Gpu, GpuReport, read_report, run_command
from holdfast.machine.gpus.visible import list_taken, list_visible
from holdfast.store.modules import python_command
from holdfast.terminal import counted

log = logging.getLogger(__name__)

# The device files of GPUs. The driver makes them; in a container only the files of its own GPUs exist.
DEVICES, DEVICE_FILES = Path("/dev"), "nvidia[0-9]*"
TORCH_WITHIN_S = 300.0  # long, because importing torch from a cold disk takes a minute


def settle_ranks(config: RunConfig) -> RunConfig:
    """Return the configuration with a number in place of ``compute.ranks = "all"``: one rank for each visible GPU.

    Without a GPU the number is 1; see `Compute.limit_ranks`. A configuration that already has a number is returned
    unchanged.

    Raises:
        ConfigError: the configuration's mesh has a different number of ranks.
        GpuUnhealthy: the GPUs can't be counted, because a GPU or the driver doesn't answer.
    """
    compute = config.compute
    if compute.ranks != "all":
        return config
    count = 1 if compute.device == "cpu" else max(1, _count_visible(compute))
    count = compute.limit_ranks(count)
    try:
        return config.with_ranks(count)
    except ConfigError as error:
        raise explain_ranks(error, count) from None


def gather_nodes(config: RunConfig) -> RunConfig:
    """Return the configuration with all ranks on this machine, for a command that trains on this machine alone.

    torchrun starts these ranks, even if another launcher starts the run's own ranks. If any number of ranks
    trains the same bytes, only the ranks of one node are started.
    """
    compute = config.compute
    if compute.nodes == 1 and compute.launcher == "torchrun":
        return config
    moved = compute.changed(nodes=1, ranks=compute.gathered_ranks, launcher="torchrun")
    return config.model_copy(update={"compute": moved})


def _count_visible(compute: Compute) -> int:
    report = read_report()
    _judge(compute, [report.problem] if report.is_fault else [], "")
    visible = list_visible(report)
    return _ask_torch() if visible is None else len(visible)


def _ask_torch() -> int:
    """Return the number of GPUs that torch sees.

    Ask in a fresh process, because the attempt itself never imports torch.
    """
    program = "import torch; print(torch.cuda.device_count())"
    try:
        exit_code, text = run_command(python_command("-c", program), TORCH_WITHIN_S)
    except subprocess.TimeoutExpired:
        return 0
    lines = text.split()
    return int(lines[-1]) if exit_code == 0 and lines and lines[-1].isdecimal() else 0


def check_gpus(compute: Compute) -> int:
    """Check that this machine has the GPUs that a run would take, and that they are healthy.

    Return the number of GPUs that the run sees; 0 if the run trains on a CPU, or if nvidia-smi doesn't list the GPUs.
    In the last case the ranks count the GPUs that torch sees, and the GPUs' health is unknown.

    Raises:
        ConfigError: fewer GPUs are visible than there are ranks.
        GpuUnhealthy: a GPU that the run would take is unhealthy, and the configuration refuses that.
    """
    if compute.device == "cpu":
        return 0
    report = read_report()
    visible = list_visible(report)
    if visible is None:
        _judge(compute, [report.problem] if report.is_fault else [], "")
        return 0
    if 0 < len(visible) < compute.rank_count and not compute.is_attached:
        raise too_few_gpus(compute.rank_count, describe_visible(report, visible))
    unhealthy = [gpu for gpu in list_taken(visible, compute.rank_count) if gpu.faults]
    others = ",".join(str(gpu.index) for gpu in visible if not gpu.faults)
    hide = f"CUDA_VISIBLE_DEVICES={others} leaves the GPU out, " if others else ""
    resets = ",".join(str(gpu.index) for gpu in unhealthy)
    hint = f"{hide}nvidia-smi --gpu-reset --id={resets} may help, "
    _judge(compute, [f"{gpu} is unhealthy: {', '.join(gpu.faults)}" for gpu in unhealthy], hint)
    return len(visible)


def describe_unseen() -> str:
    """Return the evidence that this machine has GPUs although torch sees none in this process; empty if it has none.

    GPUs that CUDA_VISIBLE_DEVICES hides don't count.
    """
    report = read_report()
    visible = list_visible(report)
    if visible:
        return f"{PROGRAM} lists {counted(len(visible), 'GPU')}"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    if visible is not None or first in ("", "-1"):
        return ""
    # With a driver that doesn't fit its libraries, neither nvidia-smi nor torch sees the GPU.
    files = sorted(DEVICES.glob(DEVICE_FILES))
    return f"{PROGRAM} lists a part of a GPU (MIG)" if report.gpus else f"this machine has {files[0]}" if files else ""


def _judge(compute: Compute, faults: list[str], hint: str) -> None:
    """Raise GpuUnhealthy for faults of GPUs, or only log warnings, depending on ``compute.gpu_health``."""
    if not faults:
        return
    if compute.gpu_health == "refuse":
        raise GpuUnhealthy("; ".join(faults), hint=f"{hint}--set compute.gpu_health=warn trains anyway")
    for fault in faults:
        log.warning("%s; training anyway, because compute.gpu_health = %r", fault, compute.gpu_health)


def too_few_gpus(ranks: int, found: str) -> ConfigError:
    """Return the error to raise if there are more ranks than GPUs.

    Args:
        found: a text with the number of GPUs, such as the result of `describe_visible`.
    """
    hint = 'each rank needs its own GPU: ranks = "all" starts one rank for each GPU, device = "cpu" any number of ranks'
    return ConfigError(f"compute.ranks = {ranks}: {found}", hint=hint)


def describe_visible(report: GpuReport, visible: tuple[Gpu, ...]) -> str:
    """Return a text with the number of visible GPUs, and of all GPUs if some are hidden."""
    if len(visible) == len(report.gpus):
        return f"this machine has {counted(len(visible), 'GPU')}"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{len(visible)} of this machine's {len(report.gpus)} GPUs are visible (CUDA_VISIBLE_DEVICES={chosen})"


def explain_ranks(error: ConfigError, ranks: int) -> ConfigError:
    """Return an error like ``error`` whose message also names ``compute.ranks = "all"``, from which the number comes.

    An error that isn't about the number of ranks is returned unchanged.
    """
    named = f"compute.ranks = {ranks}:"
    if not error.message.startswith(named):
        return error
    rest = error.message.removeprefix(named)
    return ConfigError(
        f'compute.ranks = "all" means {ranks} ranks on this machine:{rest}', hint=error.hint, **error.data
    )
