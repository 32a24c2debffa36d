"""A program ``nvidia-smi`` that prints what a real one prints for chosen GPUs, in the formats of several drivers."""

import os
from pathlib import Path
from typing import Protocol

# The fields of a healthy GPU in ``nvidia-smi -q -x``, as far as anybody here reads them, by the architecture. Drivers
# before 450 know no remapped rows; those before 560 know no recovery action, and later ones deprecate the reset status.
VOLTA = {
    "product_name": "Tesla V100-SXM2-16GB", "fb_memory_usage/total": "16384 MiB", "mig_mode/current_mig": "N/A",
    "ecc_errors/volatile/single_bit/total": "0", "ecc_errors/volatile/double_bit/total": "0",
    "ecc_errors/aggregate/single_bit/total": "0", "ecc_errors/aggregate/double_bit/total": "0",
    "retired_pages/multiple_single_bit_retirement/retired_count": "0",
    "retired_pages/double_bit_retirement/retired_count": "0",
    "retired_pages/pending_blacklist": "No", "retired_pages/pending_retirement": "No",
    "remapped_rows": "N/A", "fan_speed": "N/A",
}  # fmt: skip
AMPERE = {
    "product_name": "NVIDIA A100-SXM4-80GB", "fb_memory_usage/total": "81920 MiB", "mig_mode/current_mig": "Disabled",
    "gpu_reset_status/reset_required": "No", "gpu_reset_status/drain_and_reset_recommended": "No",
    "ecc_errors/volatile/sram_correctable": "0", "ecc_errors/volatile/sram_uncorrectable": "0",
    "ecc_errors/volatile/dram_correctable": "0", "ecc_errors/volatile/dram_uncorrectable": "0",
    "ecc_errors/aggregate/sram_uncorrectable": "0", "ecc_errors/aggregate/dram_uncorrectable": "0",
    "retired_pages/multiple_single_bit_retirement/retired_count": "N/A",
    "retired_pages/double_bit_retirement/retired_count": "N/A",
    "retired_pages/pending_blacklist": "N/A", "retired_pages/pending_retirement": "N/A",
    "remapped_rows/remapped_row_corr": "0", "remapped_rows/remapped_row_unc": "0",
    "remapped_rows/remapped_row_pending": "No", "remapped_rows/remapped_row_failure": "No", "fan_speed": "N/A",
}  # fmt: skip
DEPRECATED = "Requested functionality has been deprecated"
HOPPER = {
    "product_name": "NVIDIA H100 80GB HBM3", "fb_memory_usage/total": "81559 MiB", "mig_mode/current_mig": "Disabled",
    "gpu_reset_status/reset_required": DEPRECATED, "gpu_reset_status/drain_and_reset_recommended": DEPRECATED,
    "gpu_recovery_action": "None",
    "ecc_errors/volatile/sram_correctable": "0", "ecc_errors/volatile/sram_uncorrectable_parity": "0",
    "ecc_errors/volatile/sram_uncorrectable_secded": "0", "ecc_errors/volatile/dram_correctable": "0",
    "ecc_errors/volatile/dram_uncorrectable": "0", "ecc_errors/aggregate/sram_correctable": "0",
    "ecc_errors/aggregate/sram_uncorrectable_parity": "0", "ecc_errors/aggregate/sram_uncorrectable_secded": "0",
    "ecc_errors/aggregate/dram_correctable": "0", "ecc_errors/aggregate/dram_uncorrectable": "0",
    "ecc_errors/aggregate/sram_threshold_exceeded": "No", "ecc_errors/channel_repair_pending": "No",
    "ecc_errors/tpc_repair_pending": "No", "ecc_errors/unrepairable_memory": "No",
    "retired_pages/pending_blacklist": "N/A", "retired_pages/pending_retirement": "N/A",
    "remapped_rows/remapped_row_corr": "0", "remapped_rows/remapped_row_unc": "0",
    "remapped_rows/remapped_row_pending": "No", "remapped_rows/remapped_row_failure": "No", "fan_speed": "N/A",
}  # fmt: skip
# A card for games has no ECC.
GEFORCE = HOPPER | dict.fromkeys([name for name in HOPPER if name.startswith("ecc_errors/")], "N/A") | {
    "product_name": "NVIDIA GeForce RTX 3090", "fb_memory_usage/total": "24576 MiB", "mig_mode/current_mig": "N/A",
    "remapped_rows/remapped_row_pending": "N/A", "remapped_rows/remapped_row_failure": "N/A", "fan_speed": "ERR!",
}  # fmt: skip
LOST = (
    "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
)
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)
# What a GPU with uncorrected errors has instead.
SICK = {"ecc_errors/volatile/dram_uncorrectable": "2"}
NO_DEVICES = "No devices were found\n"


def uuid(index: int) -> str:
    """Return the UUID of a GPU. The first characters of the first two UUIDs are equal."""
    return f"GPU-5135{index // 2}{index}b6-7d19-9063-b049-1e69664bb29{index}"


def print_gpus(*gpus: dict[str, str]) -> str:
    """Return the output of ``nvidia-smi -q -x`` for GPUs with these fields."""
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>'
    shown = [_print_gpu(fields | {"uuid": fields.get("uuid", uuid(index))}) for index, fields in enumerate(gpus)]
    return "\n".join([head, "<driver_version>575.51.02</driver_version>", *shown, "</nvidia_smi_log>\n"])


def _print_gpu(fields: dict[str, str]) -> str:
    tree: dict[str, object] = {}
    for path, value in fields.items():
        *folders, last = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})  # type: ignore[assignment]
        inner[last] = value
    return f'<gpu id="00000000:3B:00.0">\n{_print_tree(tree)}\n</gpu>'


def _print_tree(tree: object) -> str:
    if not isinstance(tree, dict):
        return str(tree)
    return "\n".join(f"<{name}>{_print_tree(inner)}</{name}>" for name, inner in tree.items())


def install(folder: Path, text: str, exit_code: int = 0, *, hangs: bool = False) -> str:
    """Write a program ``nvidia-smi`` into a folder. Return a PATH on which it comes first.

    Args:
        text: its output, which lies beside it as ``nvidia-smi.txt``.
        hangs: whether it sleeps for an hour instead, as one process, of which nothing is left once it is killed.
    """
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    prints = f'cat "$0.txt"\nexit {exit_code}'
    program.write_text(f"#!/bin/sh\n{'exec sleep 3600' if hangs else prints}\n")
    program.chmod(0o755)
    (folder / "nvidia-smi.txt").write_text(text)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


class Machine(Protocol):
    """A function that puts GPUs into this machine, for the rest of a test.

    Args:
        found: the fields of each GPU.
        text: what nvidia-smi prints instead.
        visible: the value of CUDA_VISIBLE_DEVICES; empty to unset it.
    """

    def __call__(
        self, *found: dict[str, str], text: str = "", exit_code: int = 0, hangs: bool = False, visible: str = ""
    ) -> None: ...
