"""One run on the nodes of a Ray cluster: nodes that go and come, an attempt that is told to end or is killed."""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.departure import MOST_SHADOWED
from tests.conftest import IN_SOAK, has_not_ended, kill_tree
from tests.support.machines import LONG, LONG_STEPS, Nodes, nodes_in
from tests.support.processes import command_of
from tests.support.ray_cluster import ENVIRONMENT, RayCluster, ray_cluster
from tests.support.waiting import await_equal

pytestmark = [pytest.mark.slow, pytest.mark.pool, pytest.mark.extras("ray")]

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Yield a cluster of two nodes."""
    with ray_cluster() as started:
        started.add(2)
        yield started


@pytest.fixture
def run(tmp_path: Path, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Yield the command of a run on both nodes, with a rank on each. The command is that of node 0, the only one."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    ray = ['compute.launcher = "ray"', "compute.nodes = 2"]
    with nodes_in(tmp_path, [*LONG, *ray]) as made:
        yield made


def test_a_killed_node_is_noticed_and_a_new_one_joins(run: Nodes, cluster: RayCluster, undisturbed: str) -> None:
    """The run continues with the other node alone, then on both again, and ends on the bytes of an undisturbed one."""
    run.settings = [*run.settings[:-1], 'compute.nodes = "1:2"', "compute.wait_s = 20"]
    attempt = run.start(0)
    run.await_step(16)
    cluster.kill(1)
    run.await_word(0, f" ({HOST}) is lost: ")
    run.await_step(run.step() + 16)
    attempt.send_signal(signal.SIGSTOP)  # so that the run doesn't end before the node is there
    cluster.add()
    await_end_of_ranks(attempt.pid)
    attempt.send_signal(signal.SIGCONT)
    assert run.wait(0) == 0, run.said(0)
    assert "warning: a node has joined the Ray cluster, so the ranks start again" in run.said(0)
    assert run.said(0).count("waiting for room on the Ray cluster at 127.0.0.1:") == 3
    assert run.list_commits()[LONG_STEPS] in undisturbed


def test_the_ranks_of_a_cluster_rehearse(run: Nodes, undisturbed: str) -> None:
    run.start(0, "--set", "proof.rehearse=first")
    assert run.wait(0) == 0, run.said(0)
    assert "rehearsed: new ranks trained steps " in run.said(0)
    assert run.list_commits()[LONG_STEPS] in undisturbed


def test_however_the_attempt_ends_what_was_trained_is_kept(run: Nodes, undisturbed: str) -> None:
    """SIGTERM saves and commits; after SIGKILL the ranks save, alone, and the next attempt adopts what they saved."""
    run.start(0)
    run.await_step(16)
    run.started[0].send_signal(signal.SIGTERM)
    assert run.wait(0) == 143, run.said(0)
    newest = run.journal.newest()
    assert newest is not None
    assert newest.why == "preempted"

    attempt = run.start(0)
    # Past the steps that are compared with those of the stopped ranks: there the ranks wait at a commit.
    run.await_step(newest.step + MOST_SHADOWED + 8)
    attempt.kill()  # the process that carries its ranks lives on, until they have saved
    attempt.wait()

    attempt = run.start(0, "--set", "compute.nodes=1")  # so that no torchrun is between the rank and Ray
    run.await_word(0, "adopting ")
    run.await_step(run.step() + 16)
    kill_tree(attempt.pid)  # with the process that carries its rank, whose actor Ray now ends
    attempt.wait()

    run.start(0)
    assert run.wait(0) == 0, run.said(0)
    *_, third, fourth = run.said(0).split("waiting for room ")
    assert "which a dead attempt had saved" in third
    assert "which a dead attempt had saved" in fourth
    assert run.list_commits()[LONG_STEPS] in undisturbed


@IN_SOAK
def test_an_error_on_another_node_reaches_the_attempt(run: Nodes) -> None:
    run.start(0, "--set", "settings.how=raise", "--set", "settings.rank=1")
    assert run.wait(0) == 3
    error = run.said(0).partition("error: ")[2]
    assert f"training failed in step 2 of rank 1 on {HOST}: " in error
    assert "tests/support/failing.py:" in error


def test_a_rank_that_hangs_on_a_node_is_named_and_replaced(run: Nodes, tmp_path: Path) -> None:
    run.settings = ['recipe = "tests.support.failing:hanging"', *run.settings[1:], "extensions.hangs.hung_after_s = 5"]
    struck = tmp_path / "struck"
    run.start(0, *(f"--set=settings.{each}" for each in ("how=stop", "rank=1", f"struck={struck}")))
    assert run.wait(0) == 0, run.said(0)
    assert re.search(
        rf"warning: rank 1 \(process \d+ on {HOST}\) hangs in step .*: its process is stopped", run.said(0)
    )


def test_a_process_of_rays_that_dies_is_replaced(run: Nodes, undisturbed: str) -> None:
    """Ray kills it if its node runs out of memory. The ranks that it has started save."""
    run.start(0)
    run.await_step(16)
    carriers = [each for each in psutil.process_iter() if is_carrier(each)]
    carriers[0].kill()
    run.await_word(0, f" ({HOST}) is lost: the Ray actor that started its ranks has died")
    assert run.wait(0) == 0, run.said(0)
    assert run.list_commits()[LONG_STEPS] in undisturbed


def test_a_cluster_without_room_is_waited_for_and_named(run: Nodes) -> None:
    run.start(0, "--set", "compute.ranks=3", "--set", "compute.virtual_ranks=6", "--set", "compute.wait_s=2")
    assert run.wait(0) == 3
    assert "for 2 nodes with 3 ranks each, for up to 2 s" in run.said(0)
    error = run.said(0).partition("error: ")[2]
    assert "did not have 2 nodes with 3 CPUs free on each within 2 s; " in error
    assert f"; {HOST} has 2 CPUs" in error


def test_gpus_are_asked_of_ray(run: Nodes) -> None:
    run.start(0, "--set", "compute.device=cuda", "--set", "compute.wait_s=1")
    assert run.wait(0) == 3
    assert "with 1 CPU and 1 GPU free on each" in run.said(0)


def test_a_store_that_a_node_cannot_reach_is_named(run: Nodes, tmp_path: Path) -> None:
    """The node has another home folder than the attempt. There is no second one that could see a difference."""
    run.start(0, "--set", f"store=~/{tmp_path.name}", "--set", "compute.nodes=1", HOME=str(tmp_path))
    assert run.wait(0) == 3
    assert f"error: node 0 ({HOST}) does not share the store ~/{tmp_path.name}: attempt 1 of run 'r'" in run.said(0)
    assert not Path(f"~/{tmp_path.name}").expanduser().exists()


def test_a_cluster_that_does_not_answer_is_named(run: Nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    run.start(0, RAY_ADDRESS=address)
    assert run.wait(0) == 3
    assert f"error: no Ray cluster can be reached at {address} from {HOST}: " in run.said(0)
    assert "Traceback" not in run.said(0)


def await_end_of_ranks(attempt: int) -> None:
    """Wait until the process has ended that carries the ranks of an attempt, which is stopped."""

    def list_running() -> list[psutil.Process]:
        return [each for each in psutil.Process(attempt).children() if has_not_ended(each)]

    await_equal(list_running, [])


def is_carrier(process: psutil.Process) -> bool:
    """Return whether a process is Ray's worker for a carrier of this user."""
    with contextlib.suppress(psutil.Error):
        return process.uids().real == os.getuid() and "ray::Carrier" in " ".join(command_of(process))
    return False
