"""Tests of the place that another launcher gives a process, and of the refusal to start an attempt there."""

from pathlib import Path

import pytest

from holdfast import live
from holdfast.config import Compute, RunConfig
from holdfast.errors import ConfigError
from holdfast.rank.launchers import Slot, find_slot, refuse_launcher

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
ACCELERATE = TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}
# As Slurm 22.05 sets them. A batch script has the first two as well.
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = BATCH | {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_ID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "slot"),
    [
        ({}, Slot()),
        (BATCH, Slot()),
        (TORCHRUN, Slot("torchrun", 3, 4, 1, 2, 1, "node0:29500")),
        (ACCELERATE, Slot("accelerate launch", 3, 4, 1, 2, 1, "node0:29500")),
        (SRUN, Slot("srun", 3, 4, 1, 2, 1, "gpu03:15217")),
        (SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9"}, Slot("srun", 3, 4, 1, 2, 1, "10.0.0.1:9")),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"},
            Slot("srun", 3, 4, 3, 4, 0, "127.0.0.1:15217"),
        ),
        (SRUN | TORCHRUN, Slot("torchrun", 3, 4, 1, 2, 1, "node0:29500")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"},
            Slot("a launcher", 1, 2, 0, 1, 1, "pod-0:23456"),
        ),
    ],
)
def test_a_process_has_the_place_that_its_launcher_says(variables: dict[str, str], slot: Slot) -> None:
    assert find_slot(variables) == slot


def test_torch_finds_the_processes_of_srun() -> None:
    assert find_slot(SRUN).variables == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03", "MASTER_PORT": "15217",
    }  # fmt: skip
    assert Slot().variables == {}


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (TORCHRUN | {"WORLD_SIZE": "5"}, "torchrun started 5 processes, 2 of them on this machine: expected the same"),
        (TORCHRUN | {"RANK": "x"}, "RANK = 'x': expected a number"),
        (TORCHRUN | {"RANK": "4"}, "gave this process rank 4 of 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "1 of 0 on this machine"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": ""}, "torchrun started this process without the variable LOCAL_WORLD_SIZE"),
        (TORCHRUN | {"MASTER_PORT": ""}, "torchrun started this process without the variable MASTER_PORT"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "srun started 3,1 processes on its nodes"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_slot(variables)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (TORCHRUN, "torchrun has started 4 processes of this command"),
        (ACCELERATE, "accelerate launch has started 4 processes"),
        (SRUN, "srun has started 4 processes"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "a launcher has started 2 processes"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "a launcher has started 2 processes"),
    ],
)
def test_an_attempt_is_not_started_in_each_process_of_a_launcher(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named) as refused:
        live(RunConfig(recipe="m:f", run="r"))
    assert "--set compute.ranks=" in refused.value.hint
    assert "holdfast.attach" in refused.value.hint


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH,  # a batch script starts its commands once
        TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_RANK": "none", "WORLD_SIZE": "2"},
    ],
)
def test_a_command_that_is_started_once_is_not_refused(variables: dict[str, str]) -> None:
    refuse_launcher(Compute(), variables)


@pytest.mark.parametrize("variables", [SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_the_command_on_each_of_several_nodes_is_not_refused(variables: dict[str, str]) -> None:
    refuse_launcher(Compute(nodes=2, rendezvous="node0:29500"), variables)


def test_several_commands_on_one_of_several_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="srun has started 4 processes") as refused:
        refuse_launcher(Compute(nodes=2, rendezvous="node0:29500"), SRUN)
    assert "srun --ntasks-per-node=1 ... --set compute.ranks=2" in refused.value.hint


def test_one_command_on_each_node_of_a_run_of_one_is_told_of_the_nodes() -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_launcher(Compute(), SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_STEP_NUM_NODES": "4"})
    assert "--set compute.nodes=slurm" in refused.value.hint


def test_a_configuration_that_waits_for_another_launcher_is_refused(tmp_path: Path) -> None:
    config = RunConfig(recipe="m:f", run="r", store=str(tmp_path), compute=Compute(launcher="attached"))
    with pytest.raises(ConfigError, match=r'compute\.launcher = "attached"'):
        live(config)
    assert list(tmp_path.iterdir()) == []
