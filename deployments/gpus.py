"""The workers of the pool `gpu` on this machine: one worker for all GPUs, or one for each GPU (`make up GPUS=2`)."""

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from deployments.ledger import ProcessLedger, end_processes
from holdfast.errors import ConfigError
from holdfast.machine.gpus.checks import describe_visible
from holdfast.machine.gpus.report import Gpu, read_report
from holdfast.machine.gpus.visible import list_visible

WORKER = "worker-gpu"
# The environment variable with the GPU of a worker for one GPU. All processes that the worker starts inherit it.
GPU_VARIABLE = "HOLDFAST_GPU"
RELEASED_WITHIN_S = 10.0
WITHOUT = "make up, without GPUS, starts one worker for the whole machine"


@dataclass(frozen=True)
class WorkerPlan:
    """The planned workers of the pool.

    Attributes:
        gpus: the GPU of each worker, by the worker's name, as CUDA_VISIBLE_DEVICES spells it; empty for a worker that
            sees all GPUs.
        notes: lines for a person about GPUs that get no worker, or whose health is unknown.
    """

    gpus: Mapping[str, str]
    notes: tuple[str, ...] = ()


def plan_workers(asked: str, ledger: ProcessLedger) -> WorkerPlan:
    """Return the workers for the value of GPUS: a number, ``all``, or nothing.

    Without a value, keep the workers in the ledger of `make up`. So a plain `make up` restarts the workers that died.

    Raises:
        ConfigError: this machine has fewer healthy GPUs, or their number is unknown.
    """
    if not asked:
        known = {name: str(entry["gpu"]) for name, entry in ledger.known.items() if "gpu" in entry}
        return WorkerPlan(known or {WORKER: ""})
    if asked != "all" and not (asked.isdecimal() and int(asked)):
        raise ConfigError(f"GPUS={asked}: expected a number of GPUs, or all", hint="make up GPUS=all")
    report = read_report()
    visible = list_visible(report)
    if visible is None:
        if report.problem and shutil.which("nvidia-smi"):
            raise ConfigError(f"GPUS={asked}: {report.problem}", hint="holdfast doctor shows the GPUs")
        return _plan_unseen(asked, is_split=not report.problem)
    if not visible:
        raise ConfigError(f"GPUS={asked}: no GPU is visible here", hint=WITHOUT)
    return _plan_seen(asked, visible, describe_visible(report, visible))


def _plan_seen(asked: str, visible: tuple[Gpu, ...], found: str) -> WorkerPlan:
    healthy = [gpu for gpu in visible if not gpu.faults]
    faults = [f"{gpu} is unhealthy: {', '.join(gpu.faults)}" for gpu in visible if gpu.faults]
    number = len(healthy) if asked == "all" else int(asked)
    if number > len(visible):
        raise ConfigError(f"GPUS={asked}: {found}", hint="GPUS=all starts a worker for each GPU")
    if number > len(healthy) or not healthy:
        hint = f"GPUS={len(healthy)} leaves out the unhealthy GPUs" if healthy else "a reset of a GPU may help"
        raise ConfigError(f"GPUS={asked}: {'; '.join(faults)}", hint=hint)
    return WorkerPlan({f"{WORKER}-{gpu.index}": gpu.uuid for gpu in healthy[:number]}, tuple(faults))


def _plan_unseen(asked: str, *, is_split: bool) -> WorkerPlan:
    """Return the plan for GPUs that nvidia-smi doesn't list, named as in CUDA_VISIBLE_DEVICES, or else by number.

    Args:
        is_split: whether a GPU is divided into instances (MIG), which have no numbers.
    """
    entries = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    if is_split and not entries:
        hint = "name the partitions: CUDA_VISIBLE_DEVICES=MIG-...,MIG-...; nvidia-smi -L lists them"
        raise ConfigError(
            f"GPUS={asked}: a GPU is partitioned with MIG, so a worker needs the name of one of its partitions",
            hint=hint,
        )
    if asked == "all" and not entries:
        hint = "make up GPUS=2 starts a worker for each of two GPUs"
        raise ConfigError("GPUS=all: nvidia-smi, which counts the GPUs, is not on PATH", hint=hint)
    number = len(entries) if asked == "all" else int(asked)
    if entries and number > len(entries):
        shown = ",".join(entries)
        raise ConfigError(
            f"GPUS={asked}: CUDA_VISIBLE_DEVICES={shown} names {len(entries)} of them only",
            hint="make up GPUS=all takes all GPUs",
        )
    chosen = entries or [str(index) for index in range(number)]
    note = "the health of the GPUs is not known: nvidia-smi doesn't describe them"
    return WorkerPlan({f"{WORKER}-{index}": entry for index, entry in enumerate(chosen[:number])}, (note,))


def end_others(ledger: ProcessLedger, plan: WorkerPlan) -> list[str]:
    """End the workers that aren't in the plan, or that have a different GPU in the plan; return their names.

    Their flow runs save first. The runs continue in new attempts on different workers.
    """
    others = [
        name
        for name, entry in ledger.known.items()
        if name.startswith(WORKER) and entry.get("gpu", "") != plan.gpus.get(name)
    ]
    return end_processes(ledger, others)


def describe_gpu(gpu: str) -> dict[str, str]:
    """Return the environment of a worker that sees only this GPU; an empty dict for a worker that sees all GPUs."""
    return {"CUDA_VISIBLE_DEVICES": gpu, GPU_VARIABLE: gpu} if gpu else {}


def find_leftover(gpu: str, within_s: float = RELEASED_WITHIN_S) -> int | None:
    """Return the process that a dead worker for this GPU has left behind; None if it ends within ``within_s`` seconds.

    An attempt outlives its worker. If a new worker started a flow run meanwhile, two runs would share the GPU.
    """
    deadline = time.monotonic() + within_s
    while (found := _find_user(gpu)) is not None and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _find_user(gpu: str) -> int | None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            if process.environ().get(GPU_VARIABLE) == gpu and process.status() != psutil.STATUS_ZOMBIE:
                return int(process.pid)
    return None
