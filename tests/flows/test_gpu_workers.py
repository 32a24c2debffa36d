"""A worker for each GPU: two runs never share one, whatever starts, waits or dies."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deployments import local
from deployments.gpus import GPU_VARIABLE, plan_workers
from deployments.ledger import ProcessLedger, end_processes
from tests.conftest import IN_SOAK, has_not_ended, kill_tree
from tests.support.nvidia_smi import HOPPER, install, print_gpus, uuid
from tests.support.pools import ENDS_WITHIN_S, Pool, PoolRun, await_true, served
from tests.support.processes import variables_of

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.pool, pytest.mark.timeout(1500)]

UNSEEN = {"gpu_health": "warn"}  # torch sees none of these GPUs, so the runs train on the CPU


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Pool]:
    """Yield a pool without workers, on a machine with three GPUs on which a step of the toy recipe takes a while."""
    folder = tmp_path_factory.mktemp("state")
    pool = Pool(ProcessLedger(folder), {})
    with (shared / "gpus").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of pytest would have the same GPUs
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setenv("PATH", install(folder / "bin", print_gpus(HOPPER, HOPPER, HOPPER)))
        patch.setenv("TOY_DELAY_S", "0.2")
        try:
            with served(pool):
                pool.set_up()
                pool.start_worker("stable")
                yield pool
        finally:
            for process in filter(holds_gpu, psutil.process_iter()):  # attempts outlive their workers
                kill_tree(process.pid)


def holds_gpu(process: psutil.Process) -> bool:
    return variables_of(process).get(GPU_VARIABLE) in map(uuid, range(3)) and has_not_ended(process)


def make_up(pool: Pool, gpus: str) -> None:
    """Do what `make up GPUS=...` does once the server has started."""
    local.start_gpu_workers(pool.ledger, plan_workers(gpus, pool.ledger), pool.url)


def gpu_of(pid: int) -> str:
    """Return the GPUs that a process sees."""
    return variables_of(psutil.Process(pid))["CUDA_VISIBLE_DEVICES"]


def count_attempts(runs: list[PoolRun]) -> int:
    return sum(run.journal().attempts() for run in runs)


@IN_SOAK
def test_gpus_that_no_machine_has_are_one_line_on_the_flow_run(pool: Pool, tmp_path: Path) -> None:
    make_up(pool, "1")
    run = PoolRun(pool, tmp_path, "too-many")
    train = pool.await_end(run.start(compute={"ranks": 4}))
    line = f"compute.ranks = 4: 1 of this machine's 3 GPUs are visible (CUDA_VISIBLE_DEVICES={uuid(0)})"
    (attempt,) = run.attempts()
    for flow_run in (attempt, train):
        assert flow_run["state"]["type"] == "FAILED"
        assert line in flow_run["state"]["message"]
    assert run.journal().attempts() == 0
    train = run.start(compute={"ranks": "all"} | UNSEEN)  # the run is not lost
    run.await_commits(1)
    pool.cancel(train)
    pool.await_end(train)


def test_two_runs_never_share_a_gpu(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_up(pool, "2")
    workers = {name: pool.ledger.known[name]["pid"] for name in ("worker-gpu-0", "worker-gpu-1")}
    assert list(map(gpu_of, workers.values())) == [uuid(0), uuid(1)]
    runs = [PoolRun(pool, tmp_path, f"run-{number}") for number in range(3)]
    for run in runs:
        run.start(epochs=100, compute=UNSEEN)
    await_true(lambda: count_attempts(runs) == 2, "two attempts did not begin", ENDS_WITHIN_S)
    trained = [run for run in runs if run.journal().attempts()]
    for run in trained:
        run.await_commits(2)
    assert {gpu_of(run.journal().read_attempt(1).pid) for run in trained} == {uuid(0), uuid(1)}
    assert count_attempts(runs) == 2  # the third run waits for a GPU

    # With one worker fewer, an attempt saves and ends, and its run waits, too.
    make_up(pool, "1")
    assert "ended       worker-gpu-1" in capsys.readouterr().out
    stays, ended = sorted(trained, key=lambda run: len(run.reasons()))
    assert [reason for reason, _ in ended.reasons()] == ["preempted"]
    engine = stays.journal().read_attempt(1).pid
    assert gpu_of(engine) == uuid(0)

    # The worker dies alone. Its attempt continues, so a new worker would take another run for the same GPU.
    psutil.Process(workers["worker-gpu-0"]).kill()
    await_true(lambda: not pool.ledger.is_alive("worker-gpu-0"), "the worker did not die", ENDS_WITHIN_S)
    make_up(pool, "")
    assert "left out    worker-gpu-0" in capsys.readouterr().out
    kill_tree(engine)
    make_up(pool, "")
    assert f"worker      worker-gpu-0   {uuid(0)}" in capsys.readouterr().out
    await_true(lambda: count_attempts(runs) == 3, "no run took the free GPU", ENDS_WITHIN_S)

    # Other runs wait for the GPU; none of them begins while the attempt is ended.
    assert end_processes(pool.ledger, ["worker-stable"]) == ["worker-stable"]
    assert end_processes(pool.ledger, ["worker-gpu-0"]) == ["worker-gpu-0"]
    assert count_attempts(runs) == 3
    assert not [process for process in psutil.process_iter() if holds_gpu(process)]
