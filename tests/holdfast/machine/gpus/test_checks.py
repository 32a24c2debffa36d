"""Tests of the GPUs that a run takes: their number, their health, and what is said where there are none."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import Compute, RunConfig, parse_config
from holdfast.errors import ConfigError, GpuUnhealthy
from holdfast.machine.gpus import checks
from holdfast.machine.gpus.checks import check_gpus, explain_ranks, settle_ranks
from holdfast.training.devices import choose_cuda
from tests.conftest import Engine, Reference, assert_same_bytes
from tests.support.nvidia_smi import (
    HOPPER,
    LOST,
    NO_DEVICES,
    NO_DRIVER,
    SICK,
    Machine,
    install,
    print_gpus,
    uuid,
)


def config(**compute: Any) -> RunConfig:
    return parse_config({"recipe": "tests.support.toy:toy", "run": "toy", "compute": compute})


@pytest.mark.parametrize(
    ("found", "visible", "ranks"), [(1, "", 1), (4, "", 4), (4, "1,3", 2), (4, "-1", 1), (0, "", 1)]
)
def test_all_is_a_rank_for_each_visible_gpu(machine: Machine, found: int, visible: str, ranks: int) -> None:
    machine(*[HOPPER] * found, visible=visible)
    settled = settle_ranks(config(ranks="all"))
    assert settled.compute.ranks == settled.compute.rank_count == ranks
    assert settled == config(ranks=ranks)
    assert settled.identity == config(ranks=ranks).identity


@pytest.mark.parametrize(("found", "shares", "ranks"), [(5, 8, 4), (8, 2, 4), (1, 8, 2)])
def test_with_virtual_ranks_on_a_mesh_all_is_whole_tensor_groups(
    machine: Machine, found: int, shares: int, ranks: int
) -> None:
    machine(*[HOPPER] * found)
    compute = {"parallel": "fsdp", "virtual_ranks": shares, "mesh": {"tensor": 2}}
    settled = settle_ranks(config(ranks="all", **compute)).compute
    assert settled.mesh is not None
    assert (settled.ranks, settled.mesh.size, settled.mesh.tensor) == (ranks, ranks, 2)


@pytest.mark.parametrize(("device", "found"), [("auto", 1), ("auto", 3), ("cpu", 4)])
def test_all_is_refused_if_a_mesh_without_virtual_ranks_has_another_number(
    machine: Machine, device: str, found: int
) -> None:
    machine(*[HOPPER] * found)
    asked = config(ranks="all", device=device, parallel="fsdp", mesh={"shard": 2, "tensor": 2})
    ranks = 1 if device == "cpu" else found
    expected = (
        f'compute.ranks = "all" means {ranks} ranks on this machine: compute.mesh has 4 ranks, but the run has {ranks}'
    )
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        settle_ranks(asked)
    with pytest.raises(ConfigError, match="mesh has 4 ranks, but the run has 1"):
        asked.attached(1, 1)
    assert asked.attached(2, 2).compute.mesh == asked.compute.mesh


def test_all_is_one_rank_on_a_cpu(machine: Machine) -> None:
    machine(HOPPER, HOPPER)
    assert settle_ranks(config(ranks="all", device="cpu")).compute.ranks == 1


def test_a_number_stays_and_nobody_is_asked(no_program: None) -> None:
    asked = config(ranks=3)
    assert settle_ranks(asked) is asked


def test_torch_counts_the_gpus_where_nvidia_smi_can_not(no_program: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle_ranks(config(ranks="all")).compute.ranks == max(1, torch.cuda.device_count())
    monkeypatch.setattr(checks, "run_command", lambda command, within_s: (0, "a warning\n4\n"))
    assert settle_ranks(config(ranks="all")).compute.ranks == 4
    monkeypatch.setattr(checks, "run_command", lambda command, within_s: (1, "ImportError: 4\n"))
    assert settle_ranks(config(ranks="all")).compute.ranks == 1


def test_gpus_that_can_not_be_counted_are_refused(machine: Machine) -> None:
    machine(text=LOST, exit_code=15)
    with pytest.raises(GpuUnhealthy, match="GPU is lost"):
        settle_ranks(config(ranks="all"))


# ---- the check before a run


@pytest.mark.parametrize(
    ("visible", "found"),
    [("", "this machine has 2 GPUs"), ("1", "1 of this machine's 2 GPUs are visible (CUDA_VISIBLE_DEVICES=1)")],
)
def test_more_ranks_than_gpus_are_refused(machine: Machine, visible: str, found: str) -> None:
    machine(HOPPER, HOPPER, visible=visible)
    with pytest.raises(ConfigError) as refused:
        check_gpus(Compute(ranks=4))
    assert refused.value.message == f"compute.ranks = 4: {found}"
    assert 'ranks = "all"' in refused.value.hint


def test_several_ranks_train_on_a_machine_without_a_gpu(machine: Machine) -> None:
    machine(text=NO_DEVICES)
    assert check_gpus(Compute(ranks=4)) == 0
    machine(HOPPER)
    assert check_gpus(Compute(ranks=4, device="cpu")) == 0


def test_a_rank_checks_the_number_by_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_cuda(Compute(ranks=2))
    assert not choose_cuda(Compute(ranks=4, device="cpu"))
    with pytest.raises(ConfigError, match=r"compute\.ranks = 4: torch sees 2 GPUs here"):
        choose_cuda(Compute(ranks=4))


def test_an_unhealthy_gpu_is_refused(machine: Machine) -> None:
    machine(HOPPER, HOPPER | SICK | {"gpu_recovery_action": "Reset"}, HOPPER)
    with pytest.raises(GpuUnhealthy) as refused:
        check_gpus(Compute(ranks=2))
    assert refused.value.message == (
        f"GPU 1 (NVIDIA H100 80GB HBM3, {uuid(1)}) is unhealthy: 2 uncorrected ECC errors since its last reset, "
        "the GPU's driver asks for a recovery: Reset"
    )
    assert refused.value.hint == (
        "CUDA_VISIBLE_DEVICES=0,2 leaves the GPU out, nvidia-smi --gpu-reset --id=1 may help, "
        "--set compute.gpu_health=warn trains anyway"
    )
    assert check_gpus(Compute(ranks=1)) == 3  # it takes the first GPU alone


def test_an_unhealthy_gpu_is_a_warning_if_you_say_so(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine(HOPPER | SICK)
    assert check_gpus(Compute(gpu_health="warn")) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "GPU 0" in warning
    assert "2 uncorrected ECC errors" in warning


def test_a_driver_that_lost_a_gpu_is_refused(machine: Machine) -> None:
    machine(text=LOST, exit_code=15)
    with pytest.raises(GpuUnhealthy, match="GPU is lost") as refused:
        check_gpus(Compute())
    assert refused.value.hint == "--set compute.gpu_health=warn trains anyway"
    assert check_gpus(Compute(gpu_health="warn")) == 0
    assert check_gpus(Compute(device="cpu")) == 0


def test_a_machine_whose_gpus_nobody_describes_is_not_refused(machine: Machine) -> None:
    machine(text=NO_DRIVER, exit_code=9)
    assert check_gpus(Compute(ranks=2)) == 0


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see no GPU, as with a driver that has failed, or in a build for the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("device", "is_built"), [("auto", False), ("auto", True), ("cuda", True)])
def test_a_run_whose_gpus_torch_can_not_use_is_refused(
    blind: None, machine: Machine, monkeypatch: pytest.MonkeyPatch, device: Any, is_built: bool
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    machine(HOPPER, HOPPER)
    with pytest.raises(GpuUnhealthy, match=r"^nvidia-smi lists 2 GPUs, but torch sees none") as refused:
        choose_cuda(Compute(device=device))
    assert 'compute.device = "cpu" trains on the CPU' in refused.value.hint
    assert not choose_cuda(Compute(device="cpu"))
    assert not choose_cuda(Compute(gpu_health="warn"))
    machine(HOPPER, visible="MIG-0a1b")
    with pytest.raises(GpuUnhealthy, match=r"a part of a GPU \(MIG\)"):
        choose_cuda(Compute(device=device))


def test_a_gpu_whose_driver_does_not_answer_is_refused(
    blind: None, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    machine(text="Failed to initialize NVML: Driver/library version mismatch\n", exit_code=18)
    assert not choose_cuda(Compute())
    (tmp_path / "nvidia0").touch()
    with pytest.raises(GpuUnhealthy, match=r"^this machine has .*/nvidia0, but torch sees none"):
        choose_cuda(Compute())


@pytest.mark.parametrize("hidden", ["-1", " "])
def test_hidden_gpus_leave_a_run_to_the_cpu(
    blind: None, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    machine(HOPPER, visible=hidden)
    assert not choose_cuda(Compute())
    machine(text=NO_DRIVER, exit_code=9, visible=hidden)
    assert not choose_cuda(Compute())


# ---- a run


def on(folder: Path, *found: dict[str, str], **environment: str) -> dict[str, str]:
    """Return the environment of a machine with these GPUs."""
    return {"PATH": install(folder / "bin", print_gpus(*found))} | environment


def recorded(engine: Engine) -> tuple[object, str]:
    """Return the number of ranks and the fingerprint that the run has on record."""
    snapshot = json.loads((engine.run_folder / "config.snapshot.json").read_text())
    return snapshot["config"]["compute"]["ranks"], snapshot["fingerprint"]


def test_a_refused_number_says_that_all_stands_for_it() -> None:
    refused = ConfigError("compute.ranks = 3: a batch of 4 samples can't be divided evenly over ranks", hint="1, 2, 4")
    explained = explain_ranks(refused, 3)
    assert str(explained) == (
        'compute.ranks = "all" means 3 ranks on this machine: a batch of 4 samples can\'t be divided evenly over ranks'
    )
    assert explained.hint == "1, 2, 4"
    other = ConfigError("compute.virtual_ranks = 3: virtual ranks can't train")
    assert explain_ranks(other, 3) is other


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees different GPUs than the program prints")


@no_gpu
@pytest.mark.slow
def test_all_trains_as_the_number_that_it_stands_for(engine: Engine, tmp_path: Path) -> None:
    two = on(tmp_path, HOPPER, HOPPER)
    started = engine.run("compute.ranks=all", "compute.gpu_health=warn", "epochs=1", **two)
    assert started.returncode == 0, started.stderr
    assert 'compute.ranks = "all" is 2 here' in started.stderr
    ranks, fingerprint = recorded(engine)
    assert ranks == 2
    for number in ("2", "all"):
        options = ("--set", f"compute.ranks={number}", "--json")
        diff = engine.command("diff", str(engine.run_folder), str(engine.config), *options, **two)
        assert "compute.ranks" not in diff.stdout, diff.stderr

    went_on = engine.run("compute.ranks=all", "compute.gpu_health=warn", "epochs=2", **two, CUDA_VISIBLE_DEVICES="1")
    assert went_on.returncode == 0, went_on.stderr
    assert "ranks: saved 2, here 1" in went_on.stderr
    ranks, other = recorded(engine)
    assert ranks == 1
    assert other != fingerprint
    three = on(tmp_path, HOPPER, HOPPER, HOPPER)
    refused = engine.run("compute.ranks=all", "compute.gpu_health=warn", "epochs=3", **three)
    assert refused.returncode == 1
    assert 'error: compute.ranks = "all" means 3 ranks on this machine: a batch of 4 samples can\'t' in refused.stderr
    assert "hint: these numbers of ranks divide the batch: 1, 2, 4" in refused.stderr


@pytest.mark.slow
def test_a_run_goes_on_with_all_and_with_the_number(engine: Engine, reference: Reference, tmp_path: Path) -> None:
    one = on(tmp_path, HOPPER)
    for settings in (("compute.ranks=all", "epochs=1"), ("epochs=2",), ("compute.ranks=all",)):
        done = engine.run(*settings, "compute.gpu_health=warn", **one)
        assert done.returncode == 0, done.stderr
    assert recorded(engine)[0] == 1
    assert_same_bytes(engine, reference)


@pytest.mark.slow
def test_a_run_refuses_an_unhealthy_gpu(engine: Engine, tmp_path: Path) -> None:
    sick = on(tmp_path, HOPPER | SICK)
    refused = engine.run("epochs=1", **sick)
    assert refused.returncode == 3
    error, hint = [line for line in refused.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert error.startswith("error: GPU 0 (NVIDIA H100 80GB HBM3, ")
    assert error.endswith("is unhealthy: 2 uncorrected ECC errors since its last reset")
    assert "compute.gpu_health=warn" in hint
    assert "Traceback" not in refused.stderr
    assert not (engine.run_folder / "attempts").exists()
    trained = engine.run("epochs=1", "compute.gpu_health=warn", **sick)
    assert trained.returncode == 0, trained.stderr
    assert "training anyway, because compute.gpu_health" in trained.stderr


@no_gpu
@pytest.mark.slow
def test_a_run_on_a_gpu_does_not_go_on_with_the_cpu(engine: Engine, tmp_path: Path) -> None:
    refused = engine.run("epochs=1", **on(tmp_path, HOPPER))
    assert refused.returncode == 3, refused.stderr
    assert "error: nvidia-smi lists 1 GPU, but torch sees none" in refused.stderr
    assert "Traceback" not in refused.stderr
    trained = engine.run("epochs=1", "compute.gpu_health=warn", **on(tmp_path, HOPPER))
    assert trained.returncode == 0, trained.stderr
    assert "nvidia-smi lists 1 GPU, but torch sees none: training runs on the CPU" in trained.stderr


@no_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "error"),
    [("compute.ranks=4", "error: compute.ranks = 4: this machine has 2 GPUs"),
     ("compute.device=cuda", "error: compute.device = \"cuda\": torch sees no GPU here")],
)  # fmt: skip
def test_a_run_refuses_gpus_that_the_machine_does_not_have(
    engine: Engine, tmp_path: Path, setting: str, error: str
) -> None:
    refused = engine.run(setting, **on(tmp_path, HOPPER, HOPPER))
    assert refused.returncode == 1
    assert [line for line in refused.stderr.splitlines() if line.startswith("error:")] == [error]


@pytest.mark.slow
def test_a_gpu_that_fails_during_training_is_named(engine: Engine, tmp_path: Path) -> None:
    """Ranks that died are not started again on a GPU that reports a fault."""
    healthy = on(tmp_path)  # a GPU is there once it is sick, so that torch needn't see it before
    struck = tmp_path / "struck"
    program = tmp_path / "bin" / "nvidia-smi"
    (tmp_path / "bin" / "sick").write_text(print_gpus(HOPPER | SICK))
    program.write_text(f'#!/bin/sh\n[ -e {struck} ] && exec cat {tmp_path}/bin/sick\ncat "$0.txt"\n')
    fault = {"HOLDFAST_FAULT": f"chunk-reported:2:other:{struck}"}
    died = engine.run(**healthy, **fault)
    assert died.returncode == 3, died.stderr
    assert "is unhealthy: 2 uncorrected ECC errors since its last reset" in died.stderr
    ending = engine.journal().endings()[-1]
    assert ending.reason == "gpu_unhealthy"
    struck.unlink()
    engine.environment |= healthy
    assert engine.finish().complete
