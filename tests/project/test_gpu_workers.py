"""Tests of the workers that ``make up GPUS=2`` would start: one for each healthy GPU, and no GPU for two."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deployments.gpus import GPU_VARIABLE, WorkerPlan, describe_gpu, end_others, find_leftover, plan_workers
from deployments.ledger import ProcessLedger
from deployments.local import _order
from holdfast.errors import ConfigError
from tests.support.nvidia_smi import HOPPER, LOST, NO_DEVICES, NO_DRIVER, SICK, Machine, uuid
from tests.support.processes import variables_of

WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[ProcessLedger]:
    ledger = ProcessLedger(tmp_path)
    yield ledger
    for process in ledger.processes:
        process.kill()
        process.wait()


def start(ledger: ProcessLedger, name: str, **facts: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(WAITS, start_new_session=True)
    ledger.processes.append(process)
    ledger.add(name, process.pid, **facts)
    return process


@pytest.mark.parametrize(
    ("asked", "visible", "gpus"),
    [
        ("1", "", {"worker-gpu-0": uuid(0)}),
        ("2", "", {"worker-gpu-0": uuid(0), "worker-gpu-1": uuid(1)}),
        ("all", "", {"worker-gpu-0": uuid(0), "worker-gpu-1": uuid(1), "worker-gpu-2": uuid(2)}),
        ("2", "2,1", {"worker-gpu-2": uuid(2), "worker-gpu-1": uuid(1)}),
        ("all", uuid(1), {"worker-gpu-1": uuid(1)}),
    ],
)
def test_each_gpu_has_a_worker(
    asked: str, visible: str, gpus: dict[str, str], machine: Machine, ledger: ProcessLedger
) -> None:
    machine(HOPPER, HOPPER, HOPPER, visible=visible)
    assert plan_workers(asked, ledger) == WorkerPlan(gpus)


def test_an_unhealthy_gpu_has_no_worker(machine: Machine, ledger: ProcessLedger) -> None:
    machine(HOPPER, HOPPER | SICK, HOPPER)
    plan = plan_workers("all", ledger)
    assert plan.gpus == plan_workers("2", ledger).gpus == {"worker-gpu-0": uuid(0), "worker-gpu-2": uuid(2)}
    (note,) = plan.notes
    assert note.startswith("GPU 1 (NVIDIA H100 80GB HBM3, ")
    assert note.endswith("is unhealthy: 2 uncorrected ECC errors since its last reset")
    with pytest.raises(ConfigError, match=r"GPUS=3: GPU 1 .* is unhealthy") as refused:
        plan_workers("3", ledger)
    assert refused.value.hint == "GPUS=2 leaves out the unhealthy GPUs"
    machine(HOPPER | SICK)
    with pytest.raises(ConfigError, match=r"GPUS=all: GPU 0 .* is unhealthy"):
        plan_workers("all", ledger)


@pytest.mark.parametrize(
    ("asked", "text", "visible", "error"),
    [
        ("0", "", "", "GPUS=0: expected a number of GPUs, or all"),
        ("two", "", "", "GPUS=two: expected a number of GPUs, or all"),
        ("3", "", "", "GPUS=3: this machine has 2 GPUs"),
        ("2", "", "1", r"GPUS=2: 1 of this machine's 2 GPUs are visible \(CUDA_VISIBLE_DEVICES=1\)"),
        ("2", "", "-1", "GPUS=2: no GPU is visible here"),
        ("all", NO_DEVICES, "", "GPUS=all: no GPU is visible here"),
        ("2", NO_DRIVER, "", "GPUS=2: nvidia-smi failed: NVIDIA-SMI has failed"),
        ("2", LOST, "", "GPUS=2: nvidia-smi failed: Unable to determine .* GPU is lost"),
    ],
)
def test_gpus_that_the_machine_does_not_have(
    asked: str, text: str, visible: str, error: str, machine: Machine, ledger: ProcessLedger
) -> None:
    machine(HOPPER, HOPPER, text=text, exit_code=9 if text else 0, visible=visible)
    with pytest.raises(ConfigError, match=error) as refused:
        plan_workers(asked, ledger)
    assert refused.value.hint


def test_gpus_that_nobody_describes_have_numbers(
    no_program: None, ledger: ProcessLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert plan_workers("2", ledger).gpus == {"worker-gpu-0": "0", "worker-gpu-1": "1"}
    assert "not known" in plan_workers("2", ledger).notes[0]
    with pytest.raises(ConfigError, match="GPUS=all: nvidia-smi, which counts the GPUs, is not on PATH"):
        plan_workers("all", ledger)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert plan_workers("all", ledger).gpus == {"worker-gpu-0": "3", "worker-gpu-1": "5"}
    assert plan_workers("1", ledger).gpus == {"worker-gpu-0": "3"}
    with pytest.raises(ConfigError, match="GPUS=3: CUDA_VISIBLE_DEVICES=3,5 names 2 of them only"):
        plan_workers("3", ledger)


def test_parts_of_a_gpu_have_workers(machine: Machine, ledger: ProcessLedger) -> None:
    machine(HOPPER, visible="MIG-0a,MIG-1b")
    assert plan_workers("all", ledger).gpus == {"worker-gpu-0": "MIG-0a", "worker-gpu-1": "MIG-1b"}


@pytest.mark.parametrize("asked", ["2", "all"])
def test_parts_of_a_gpu_have_no_numbers(asked: str, machine: Machine, ledger: ProcessLedger) -> None:
    machine(HOPPER | {"mig_mode/current_mig": "Enabled"})
    with pytest.raises(ConfigError, match="a GPU is partitioned with MIG") as refused:
        plan_workers(asked, ledger)
    assert "nvidia-smi -L" in refused.value.hint


def test_without_gpus_one_worker_sees_them_all(no_program: None, ledger: ProcessLedger) -> None:
    assert plan_workers("", ledger) == WorkerPlan({"worker-gpu": ""})
    assert describe_gpu("") == {}


def test_make_up_without_gpus_keeps_the_workers_that_there_are(no_program: None, ledger: ProcessLedger) -> None:
    start(ledger, "worker-gpu-0", gpu="GPU-0")
    start(ledger, "worker-gpu-1", gpu="GPU-1").kill()
    start(ledger, "worker-stable")
    plan = plan_workers("", ledger)
    assert plan == WorkerPlan({"worker-gpu-0": "GPU-0", "worker-gpu-1": "GPU-1"})
    assert end_others(ledger, plan) == []


def test_workers_that_the_plan_lacks_are_ended(ledger: ProcessLedger) -> None:
    for name in ("server", "worker-stable", "worker-gpu"):
        start(ledger, name)
    for number in range(3):
        start(ledger, f"worker-gpu-{number}", gpu=f"GPU-{number}")
    plan = WorkerPlan({"worker-gpu-0": "GPU-0", "worker-gpu-1": "GPU-9"})
    assert sorted(end_others(ledger, plan)) == ["worker-gpu", "worker-gpu-1", "worker-gpu-2"]
    assert sorted(ledger.known) == ["server", "worker-gpu-0", "worker-stable"]
    assert sorted(end_others(ledger, WorkerPlan({"worker-gpu": ""}))) == ["worker-gpu-0"]


def test_workers_end_in_order() -> None:
    names = ["postgres", "server", "worker-gpu-10", "worker-gpu", "worker-gpu-0", "worker-stable"]
    assert sorted(names, key=_order) == [
        "worker-stable", "worker-gpu-10", "worker-gpu", "worker-gpu-0", "server", "postgres",
    ]  # fmt: skip


def test_a_process_that_a_worker_left_behind_holds_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu, other = (f"GPU-{number} of {tmp_path}" for number in range(2))  # these tests may run twice at a time
    monkeypatch.setenv(GPU_VARIABLE, gpu)
    with subprocess.Popen(WAITS) as left:
        monkeypatch.delenv(GPU_VARIABLE)
        assert variables_of(psutil.Process(left.pid))[GPU_VARIABLE] == gpu
        assert find_leftover(gpu, within_s=0.0) == left.pid
        assert find_leftover(other, within_s=0.0) is None
        left.kill()
        assert find_leftover(gpu) is None
