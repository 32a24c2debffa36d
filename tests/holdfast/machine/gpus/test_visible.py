"""Tests of the GPUs that a process sees, and of those that a run takes."""

import pytest

from holdfast.machine.gpus.report import read_report
from holdfast.machine.gpus.visible import list_taken, list_visible
from tests.support.nvidia_smi import (
    GEFORCE,
    HOPPER,
    Machine,
    uuid,
)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("-1", []),
        ("0,9,1", [0]),
        ("0,-1,1", [0]),
        ("NoDevFiles", []),
        (f"{uuid(2)},{uuid(0)}", [2, 0]),
        (uuid(2)[:9], [2]),
        ("GPU-5135", []),
        (f"1,{uuid(1)}", []),
        ("0,0", []),
        ("MIG-0a1b", None),
        ("0,MIG-0a1b", None),
    ],
)
def test_visible_gpus_are_those_of_cuda(machine: Machine, visible: str | None, indices: list[int] | None) -> None:
    machine(HOPPER, HOPPER, HOPPER)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = list_visible(read_report(), environ)
    assert (None if found is None else [gpu.index for gpu in found]) == indices


def test_a_gpu_in_parts_is_not_counted(machine: Machine) -> None:
    """In MIG mode a process sees one part of one GPU; nvidia-smi doesn't say which."""
    machine(HOPPER, HOPPER | {"mig_mode/current_mig": "Enabled"})
    assert list_visible(read_report(), {}) is None
    assert list_visible(read_report(), {"CUDA_VISIBLE_DEVICES": "0"}) is not None


def test_a_run_takes_the_first_gpus(machine: Machine) -> None:
    machine(HOPPER, HOPPER, HOPPER)
    visible = list_visible(read_report(), {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert visible is not None
    assert [gpu.index for gpu in list_taken(visible, 1)] == [2]
    assert [gpu.index for gpu in list_taken(visible, 2)] == [2, 0]


def test_any_of_different_gpus_may_be_the_first(machine: Machine) -> None:
    machine(GEFORCE, HOPPER)
    visible = list_visible(read_report(), {})
    assert visible is not None
    assert len(list_taken(visible, 1, {})) == 2
    assert len(list_taken(visible, 1, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == 1
