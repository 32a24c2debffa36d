"""The GPUs of this machine: which of them a run takes, and whether they are healthy. Importing it imports no torch."""

from holdfast.machine.gpus.checks import (
    check_gpus,
    describe_unseen,
    describe_visible,
    explain_ranks,
    gather_nodes,
    settle_ranks,
    too_few_gpus,
)
from holdfast.machine.gpus.report import Gpu, GpuReport, read_report
from holdfast.machine.gpus.visible import list_taken, list_visible
from holdfast.machine.gpus.waits import sleep_in_waits

__all__ = [
    "Gpu",
    "GpuReport",
    "check_gpus",
    "describe_unseen",
    "describe_visible",
    "explain_ranks",
    "gather_nodes",
    "list_taken",
    "list_visible",
    "read_report",
    "settle_ranks",
    "sleep_in_waits",
    "too_few_gpus",
]
