"""``compute.nodes = "slurm"``: the number of nodes of the Slurm job, and where they meet."""

from pathlib import Path

import pytest

from holdfast.config import load_config
from holdfast.config.slurm import find_job
from holdfast.errors import ConfigError

# As Slurm 22.05 sets them.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_NODEID": "0"}
STEP = BATCH | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text('recipe = "m:f"\nrun = "r"\n[compute]\nnodes = "slurm"\n')
    return path


def set_variables(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)


def test_a_step_of_two_nodes_meets_at_the_first(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, STEP)
    compute = load_config(config).compute
    assert (compute.nodes, compute.rendezvous) == (2, "gpu03:15217")
    assert load_config(config, ["compute.rendezvous=gpu04:9"]).compute.rendezvous == "gpu04:9"


def test_a_job_of_one_node_needs_no_meeting(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, BATCH | {"SLURM_JOB_NUM_NODES": "1"})
    compute = load_config(config).compute
    assert (compute.nodes, compute.rendezvous) == (1, None)


def test_outside_of_a_job_it_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="isn't in a Slurm job") as refused:
        load_config(config)
    assert "--set compute.nodes=1" in refused.value.hint
    assert load_config(config, ["compute.nodes=1"]).compute.nodes == 1


def test_a_batch_file_of_several_nodes_without_srun_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, BATCH)
    with pytest.raises(ConfigError, match="job 7 has 2 nodes, but this command runs on one of them only") as refused:
        load_config(config)
    assert "srun --ntasks-per-node=1" in refused.value.hint


def test_the_task_of_an_array_has_a_name_of_its_own() -> None:
    job = find_job(BATCH | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"})
    assert job is not None
    assert job.name == "7_3"


def test_jobs_steps_and_lives_of_a_job_meet_at_different_ports() -> None:
    ports = set()
    for number in range(1, 40):
        for step in range(4):
            for restarts in range(4):
                job = find_job(
                    {"SLURM_JOB_ID": f"{number}", "SLURM_STEP_ID": f"{step}", "SLURM_RESTART_COUNT": f"{restarts}"}
                )
                assert job is not None
                ports.add(job.address.rpartition(":")[2])
    assert len(ports) == 39 * 4 * 4
    assert all(15000 <= int(port) < 30000 for port in ports)
