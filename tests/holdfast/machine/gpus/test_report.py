"""Tests of what ``nvidia-smi`` prints: GPUs of several drivers, their faults, and answers that name no GPU."""

import time
from pathlib import Path

import pytest

from holdfast.machine.gpus.report import read_links, read_report
from tests.support.nvidia_smi import (
    AMPERE,
    GEFORCE,
    HOPPER,
    LOST,
    NO_DEVICES,
    NO_DRIVER,
    VOLTA,
    Machine,
    print_gpus,
    uuid,
)


@pytest.mark.parametrize("fields", [VOLTA, AMPERE, HOPPER, GEFORCE], ids=lambda fields: fields["product_name"])
def test_a_healthy_gpu_of_each_driver(machine: Machine, fields: dict[str, str]) -> None:
    machine(fields, fields)
    report = read_report()
    assert (report.problem, report.is_fault) == ("", False)
    assert [(gpu.index, gpu.uuid) for gpu in report.gpus] == [(0, uuid(0)), (1, uuid(1))]
    for gpu in report.gpus:
        assert (gpu.name, gpu.memory) == (fields["product_name"], fields["fb_memory_usage/total"])
        assert (gpu.faults, gpu.notes, gpu.is_split) == ((), (), False)


@pytest.mark.parametrize(
    ("fields", "changed", "fault"),
    [
        (VOLTA, {"ecc_errors/volatile/double_bit/total": "1"}, "1 uncorrected ECC error since its last reset"),
        (VOLTA, {"retired_pages/pending_blacklist": "Yes", "retired_pages/pending_retirement": "Yes"},
         "a faulty page of the GPU's memory stays in use until the next reset"),
        (AMPERE, {"ecc_errors/volatile/sram_uncorrectable": "1", "ecc_errors/volatile/dram_uncorrectable": "2"},
         "3 uncorrected ECC errors since its last reset"),
        (AMPERE, {"gpu_reset_status/reset_required": "Yes"}, "the GPU has to be reset"),
        (AMPERE, {"remapped_rows/remapped_row_failure": "Yes"}, "a faulty row of the GPU's memory can't be replaced"),
        (HOPPER, {"ecc_errors/volatile/sram_uncorrectable_parity": "12"},
         "12 uncorrected ECC errors since its last reset"),
        (HOPPER, {"ecc_errors/volatile/sram_uncorrectable_secded": "1"},
         "1 uncorrected ECC error since its last reset"),
        (HOPPER, {"ecc_errors/aggregate/sram_threshold_exceeded": "Yes"},
         "the GPU's SRAM has had more errors than NVIDIA allows"),
        (HOPPER, {"ecc_errors/unrepairable_memory": "Yes"}, "a part of the GPU's memory can't be repaired"),
        (HOPPER, {"gpu_recovery_action": "Drain and Reset"}, "the GPU's driver asks for a recovery: Drain and Reset"),
        (HOPPER, {"gpu_recovery_action": "Unknown Error"}, "nvidia-smi reports the GPU's health as 'Unknown Error'"),
        (HOPPER, {"utilization/gpu_util": "GPU requires reset", "temperature/gpu_temp": "GPU requires reset"},
         "nvidia-smi says 'GPU requires reset'"),
        (GEFORCE, {"fan_speed": "GPU is lost"}, "nvidia-smi says 'GPU is lost'"),
        (AMPERE, {"ecc_errors/volatile/dram_uncorrectable": "Unknown Error"},
         "nvidia-smi reports the GPU's health as 'Unknown Error'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_fault_is_seen(machine: Machine, fields: dict[str, str], changed: dict[str, str], fault: str) -> None:
    machine(fields, fields | changed)
    healthy, faulty = read_report().gpus
    assert healthy.faults == ()
    assert faulty.faults == (fault,)


@pytest.mark.parametrize(
    ("fields", "changed", "note"),
    [
        (VOLTA, {"retired_pages/double_bit_retirement/retired_count": "2"},
         "2 memory pages retired after uncorrected errors"),
        (VOLTA, {"retired_pages/multiple_single_bit_retirement/retired_count": "1"},
         "1 memory page retired after corrected errors"),
        (AMPERE, {"remapped_rows/remapped_row_pending": "Yes"},
         "a row of the GPU's memory will be replaced at the next reset"),
        (AMPERE, {"remapped_rows/remapped_row_unc": "1"}, "1 memory row replaced after uncorrected errors"),
        (HOPPER, {"ecc_errors/aggregate/dram_uncorrectable": "4"}, "4 uncorrected ECC errors in its life"),
        (HOPPER, {"ecc_errors/tpc_repair_pending": "Yes"},
         "a processing cluster will be repaired at the GPU's next reset"),
    ],
    ids=str,
)  # fmt: skip
def test_what_happened_before_is_no_fault(
    machine: Machine, fields: dict[str, str], changed: dict[str, str], note: str
) -> None:
    machine(fields | changed)
    (gpu,) = read_report().gpus
    assert (gpu.faults, gpu.notes) == ((), (note,))


@pytest.mark.parametrize(
    ("text", "exit_code", "problem", "is_fault"),
    [
        (LOST, 15, f"nvidia-smi failed: {LOST.strip()}", True),
        (print_gpus(HOPPER)[:200] + "\n" + LOST, 255, f"nvidia-smi failed: {LOST.strip()}", True),
        (NO_DRIVER, 9, f"nvidia-smi failed: {NO_DRIVER.strip()}", False),
        ("", 12, "nvidia-smi failed: exit code 12", False),
        ("Segmentation fault\n", 0, "nvidia-smi failed: Segmentation fault", False),
        (NO_DEVICES, 0, "", False),
        (NO_DEVICES, 6, "", False),
        (print_gpus(), 0, "", False),
    ],
)
def test_an_answer_without_a_gpu(machine: Machine, text: str, exit_code: int, problem: str, is_fault: bool) -> None:
    machine(text=text or "\n", exit_code=exit_code)
    report = read_report()
    assert (report.gpus, report.problem, report.is_fault) == ((), problem, is_fault)


def test_warnings_beside_the_answer_are_ignored(machine: Machine) -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"
    machine(text=warning + print_gpus(HOPPER) + warning, exit_code=14)
    (gpu,) = read_report().gpus
    assert gpu.faults == ()


def test_a_lost_gpu_that_the_answer_lacks_is_a_fault(machine: Machine) -> None:
    machine(text=print_gpus(HOPPER) + LOST)
    assert read_report().problem == f"nvidia-smi failed: {LOST.strip()}"


def test_a_machine_without_the_program(no_program: None, tmp_path: Path) -> None:
    assert read_report().problem == "nvidia-smi is not on PATH"
    (tmp_path / "nvidia-smi").touch(0o755)  # neither a program nor a script
    report = read_report()
    assert report.problem == "nvidia-smi can't be run: Exec format error"
    assert not report.is_fault


def test_a_program_that_hangs_is_a_fault(machine: Machine) -> None:
    machine(HOPPER, hangs=True)
    began = time.monotonic()
    report = read_report(within_s=0.2)
    assert time.monotonic() - began < 60
    assert (report.problem, report.is_fault) == ("nvidia-smi did not answer within 0.2 s", True)


# The answer of a machine with two GPUs and a network card.
LINKS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\t0-63\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t0-63\t0\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


def test_the_links_are_those_of_the_gpus_alone(machine: Machine) -> None:
    machine(text=LINKS)
    assert read_links() == "X NV18, NV18 X"
    machine(text=LINKS, exit_code=1)
    assert read_links() is None
    machine(text=NO_DEVICES)
    assert read_links() is None
    machine(text=LINKS, hangs=True)
    assert read_links(0.1) is None
