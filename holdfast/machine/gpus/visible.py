"""The GPUs that a process sees, and which of these GPUs a run takes."""

import os
from collections.abc import Mapping

from holdfast.machine.gpus.report import Gpu, GpuReport


def list_visible(report: GpuReport, environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...] | None:
    """Return the GPUs that a process with this environment sees, in its order.

    Return None if the report isn't sufficient: nvidia-smi gave no list, or the process sees a part of a GPU (MIG).

    Source: CUDA C++ Programming Guide, CUDA_VISIBLE_DEVICES: an invalid entry hides itself and all later entries.
    """
    if report.problem:
        return None
    visible = list(report.gpus)
    if "CUDA_VISIBLE_DEVICES" in environ:
        visible.clear()
        for entry in environ["CUDA_VISIBLE_DEVICES"].split(","):
            if entry.strip().startswith("MIG-"):
                return None
            found = _match(report.gpus, entry.strip())
            if len(found) != 1:
                break
            visible += found
    if any(gpu.is_split for gpu in visible):
        return None
    return tuple(visible) if len({*visible}) == len(visible) else ()  # CUDA refuses a list that names a GPU twice


def _match(gpus: tuple[Gpu, ...], entry: str) -> list[Gpu]:
    """Return the GPUs that an entry of CUDA_VISIBLE_DEVICES names: by index, or by the beginning of a UUID."""
    if entry.isdecimal():
        return [gpu for gpu in gpus if gpu.index == int(entry)]
    return [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]


def list_taken(visible: tuple[Gpu, ...], ranks: int, environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the GPUs that a run with this number of ranks takes: the first visible GPUs.

    If the visible GPUs are of different models, return all of them, because CUDA puts the fastest GPU first, and
    nvidia-smi doesn't say which GPU is the fastest.
    """
    has_own_order = len({gpu.name for gpu in visible}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    return visible if has_own_order else visible[:ranks]
