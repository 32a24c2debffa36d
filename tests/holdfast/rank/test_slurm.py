"""Runs on a real Slurm: a job that is ended continues its run by itself, or stays ended where that is right."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import Reference
from tests.support import slurm
from tests.support.machines import LONG, Nodes
from tests.support.slurm import Cluster, slurm_cluster
from tests.support.waiting import await_equal

MISSING = slurm.find_missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.pool,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)}"),
]

HOLDFAST = Path(sys.executable).with_name("holdfast")
LOOPBACK = "127.0.0.1"  # the nodes of `slurm_cluster` have no names of hosts
NO_TASK = "4294967294"  # what %a is in the name of a log if the job is no array


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


class Batch:
    """The batch file of a run, and the log that all lives of its job append to."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def submit(
        self, *directives: str, options: str = "", tasks: int = 1, before: str = "true", command: str = ""
    ) -> str:
        """Submit the job; return its number.

        Args:
            options: further options of ``holdfast train``.
            before: a command to run before it.
            command: a command to run in its place.
            tasks: of srun, on each node.
        """
        command = command or f"{HOLDFAST} train {Nodes(self.folder, LONG).write(0)} --set compute.nodes=slurm {options}"
        lines = [
            f"--job-name=r --requeue --open-mode=append --output={self.folder}/%a.log",
            *([f"--ntasks-per-node={tasks}"] if tasks > 1 else []),
            *directives,
        ]
        header = "".join(f"#SBATCH {line}\n" for line in lines)
        script = self.folder / "r.sbatch"
        script.write_text(
            f"#!/bin/bash\n{header}{before}\nsrun --ntasks-per-node={tasks} --kill-on-bad-exit=1 {command}\n"
        )
        return self.cluster.submit(script, MASTER_ADDR=LOOPBACK)

    def said(self, task: str = NO_TASK) -> str:
        log = self.folder / f"{task}.log"
        return log.read_text() if log.exists() else ""

    def await_step(self, step: int) -> None:
        await_equal(lambda: (newest := self.journal().newest()) is not None and newest.step >= step, True)

    def journal(self, run: str = "r") -> Journal:
        return Journal(open_store(str(self.folder / "runs")), run)

    def reasons(self, run: str = "r") -> list[str]:
        return [ending.reason for ending in self.journal(run).endings()]

    def final(self, run: str = "r") -> str:
        """Return the content id of the run's last step."""
        newest = self.journal(run).newest()
        assert newest is not None
        return newest.checkpoint_sha256


@pytest.fixture
def batch(cluster: Cluster, tmp_path: Path) -> Batch:
    cluster.await_idle()
    return Batch(cluster, tmp_path)


def test_a_preempted_job_continues_by_itself(batch: Batch, cluster: Cluster, undisturbed: str) -> None:
    """It saves within its grace and ends, so that Slurm itself would not queue it again."""
    job = batch.submit("--nodes=2")
    batch.await_step(8)
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "urgent", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"
    ).strip()
    cluster.await_ended(urgent)
    ended = cluster.await_ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), batch.said()
    assert batch.reasons() == ["preempted", "completed"]
    assert f"job {job} is queued again" in batch.said()
    assert "Traceback" not in batch.said()
    assert batch.final() in undisturbed


def test_a_job_is_queued_again_after_the_signal_that_people_are_taught(
    batch: Batch, cluster: Cluster, undisturbed: str
) -> None:
    """As with --signal=USR1@120, which every process of the step gets, torchrun and the ranks among them."""
    job = batch.submit("--nodes=1", options="--set compute.ranks=2")
    batch.await_step(8)
    cluster.run("scancel", "--signal=USR1", job)
    ended = cluster.await_ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), batch.said()
    assert batch.reasons() == ["preempted", "completed"]
    assert "told to end by SIGUSR1" in batch.said()
    assert batch.final() in undisturbed


def test_a_job_whose_ranks_srun_has_started_continues_by_itself(
    batch: Batch, cluster: Cluster, undisturbed: str
) -> None:
    script = batch.folder / "attached.py"
    config = Nodes(batch.folder, LONG).write(0)
    script.write_text(f'import holdfast\nif __name__ == "__main__":\n    holdfast.attach("{config}")\n')
    job = batch.submit("--nodes=1", tasks=2, command=f"{sys.executable} {script}")
    batch.await_step(8)
    cluster.run("scancel", "--signal=TERM", job)
    ended = cluster.await_ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), batch.said()
    assert batch.reasons() == ["preempted", "completed"]
    assert f"job {job} is queued again" in batch.said()
    assert batch.final() in undisturbed


def test_each_task_of_an_array_is_queued_again_at_its_time_limit(
    batch: Batch, cluster: Cluster, reference: Reference
) -> None:
    """The last task has the number of the whole array as its own: queueing that again would restart all tasks."""
    toy = "recipe=tests.support.toy:toy epochs=3 chunk.steps=4 compute.virtual_ranks=0"
    options = " ".join(f"--set {each}" for each in ['run="r$SLURM_ARRAY_TASK_ID"', *toy.split()])
    # The first life would take 90 s, and its time is over after 60 to 90 s.
    slow = "export TOY_DELAY_S=$((SLURM_RESTART_COUNT ? 0 : 2))"
    job = batch.submit("--nodes=1", "--array=1-2", "--time=1", options=options, before=slow)
    for task in ("1", "2"):
        ended = cluster.await_ended(f"{job}_{task}")
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), batch.said(task)
        assert batch.reasons(f"r{task}") == ["preempted", "completed"]
        assert f"job {job}_{task} is queued again" in batch.said(task)
        assert batch.final(f"r{task}") == reference.standing.checkpoint_sha256


def test_a_job_that_loses_a_node_continues_on_the_other(batch: Batch, cluster: Cluster, undisturbed: str) -> None:
    job = batch.submit("--nodes=1-2")
    batch.await_step(8)
    assert cluster.read_job(job)["NumNodes"] == "2"
    cluster.lose_node("n1")
    try:
        ended = cluster.await_ended(job)
    finally:
        cluster.start_node("n1")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), batch.said()
    assert batch.reasons()[-1] == "completed"
    assert batch.final() in undisturbed


def test_of_two_jobs_of_a_run_the_later_one_trains_it(batch: Batch, cluster: Cluster, undisturbed: str) -> None:
    """They would take the run from each other for ever."""
    first = batch.submit("--nodes=1")
    batch.await_step(8)
    attempt = psutil.Process(batch.journal().read_attempt(1).pid)
    attempt.suspend()  # on a busy machine it would complete the run before the other job begins
    try:
        second = batch.submit("--nodes=1")
        await_equal(batch.journal().attempts, 2)
    finally:
        attempt.resume()
    ended = [cluster.await_ended(job) for job in (first, second)]
    assert [(each["JobState"], each["Restarts"]) for each in ended] == [("FAILED", "0"), ("COMPLETED", "0")]
    assert (
        f"job {first} is not queued again: a further attempt would end in the same way: another process has started"
    ) in batch.said()
    assert batch.final() in undisturbed


def test_ctrl_c_to_every_process_of_a_job_saves_and_ends_it(batch: Batch, cluster: Cluster) -> None:
    job = batch.submit("--nodes=1", options="--set compute.ranks=2 --set chunk.steps=500")
    await_equal(lambda: "attempt 1 (fresh)" in batch.said(), True)
    time.sleep(2)
    cluster.run("scancel", "--signal=INT", f"{job}.0")
    ended = cluster.await_ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), batch.said()
    assert "which is saved and committed" in batch.said()
    assert f"job {job} is not queued again: Ctrl-C stopped the run" in batch.said()
    newest = batch.journal().newest()
    assert newest is not None


def test_a_job_that_is_cancelled_is_not_queued_again(batch: Batch, cluster: Cluster) -> None:
    """`scontrol requeue` would restart it."""
    job = batch.submit("--nodes=1")
    batch.await_step(8)
    cluster.run("scancel", job)
    ended = cluster.await_ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), batch.said()
    assert batch.reasons() == ["preempted"]
    assert f"job {job} is not queued again by this command: its state is COMPLETING (None)" in batch.said()


@pytest.mark.parametrize(
    ("nodes", "tasks", "options", "error"),
    [
        (1, 1, "--set settings.how=nothing --set settings.no_such=1", "no_such"),
        (1, 2, "", "srun has started 2 processes of this command"),
        (2, 2, "", "srun has started 4 processes of this command"),
    ],
)
def test_wrong_use_is_not_queued_again(
    batch: Batch, cluster: Cluster, nodes: int, tasks: int, options: str, error: str
) -> None:
    job = batch.submit(f"--nodes={nodes}", options=options, tasks=tasks)
    ended = cluster.await_ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), batch.said()
    if nodes * tasks == 1:  # srun kills the others of several, and has their exit code
        assert ended["ExitCode"] == "1:0"
    assert error in batch.said()
    assert f"job {job} is not queued again: a further attempt would end in the same way" in batch.said()


def test_the_batch_file_of_a_new_run_trains_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.await_idle()
    monkeypatch.chdir(tmp_path)
    subprocess.run([HOLDFAST, "new", "mine", "--slurm"], check=True)
    job = cluster.submit(tmp_path / "mine.sbatch")
    ended = cluster.await_ended(job)
    log = (tmp_path / f"mine-{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d attempt 1 \(fresh\)", log, re.MULTILINE)
    assert "run mine is complete" in log
