"""Runs on a work pool, with a real server and real workers: whatever dies, they end by themselves on the right bytes."""

import itertools
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Reference
from tests.pools import Pool, PoolRun, pool_up, strike

pytestmark = [pytest.mark.slow, pytest.mark.server]

STEPS = 30
CHUNK = 4
PROCESS_DEATH_WITHIN_S = 10.0
MACHINE_GONE_WITHIN_S = 30.0
names = itertools.count(1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool_up(tmp_path_factory.mktemp("pool"), TOY_DELAY_S="0.1") as pool:
        yield pool


@pytest.fixture
def run(pool: Pool, tmp_path: Path) -> PoolRun:
    return PoolRun(pool, tmp_path, f"toy-{next(names)}")


def assert_right_bytes(run: PoolRun, reference: Reference) -> None:
    standing = run.standing()
    assert standing.step == STEPS
    assert standing.checkpoint_sha256 == reference.standing.checkpoint_sha256
    store = run.journal().store
    steps = [line for name in store.list("metrics") for line in store.read(f"metrics/{name}").splitlines()]
    assert len(steps) == STEPS


def test_from_the_form(run: PoolRun, reference: Reference) -> None:
    train = run.pool.await_end(run.start())
    assert train["state"]["name"] == "Completed", train["state"]
    assert run.reasons() == [("completed", STEPS)]
    assert_right_bytes(run, reference)
    (attempt,) = run.attempts()
    assert attempt["name"] == f"{run.name} attempt 1"
    assert attempt["state"]["name"] == "Completed"
    shown = {artifact["key"]: artifact for artifact in run.pool.artifacts(attempt["id"])}
    assert shown[f"{run.name}-progress"]["data"] == 100
    assert "28-30" in str(shown[f"{run.name}-chunks"]["data"])
    (summary,) = run.pool.artifacts(train["id"])
    assert run.standing().checkpoint_sha256 in summary["data"]
    assert "chunk 1: steps 0-4" in run.pool.logs(attempt["id"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("victim", ["attempt", "ranks", "worker", "machine"])
def test_death(run: PoolRun, reference: Reference, victim: str, number: signal.Signals) -> None:
    train = run.start()
    run.await_commits(1)
    engine, ranks = run.processes(1)
    time.sleep(random.Random(f"{victim} {number}").uniform(0, 1.5))
    worker = psutil.Process(run.pool.worker())
    struck = {"attempt": [engine], "ranks": ranks, "worker": [worker], "machine": [worker, engine, *ranks]}[victim]
    strike(struck, number)
    at = time.time()
    if worker in struck:
        psutil.wait_procs([worker], timeout=30)
        run.pool.replace_worker(TOY_DELAY_S="0.1")
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    assert_right_bytes(run, reference)
    reasons = [reason for reason, _ in run.reasons()]
    expected = {
        ("attempt", signal.SIGTERM): ["preempted", "completed"],
        ("attempt", signal.SIGKILL): ["crashed", "completed"],
        ("worker", signal.SIGTERM): ["vanished", "completed"],
        ("machine", signal.SIGTERM): ["vanished", "completed"],
        ("machine", signal.SIGKILL): ["vanished", "completed"],
    }.get((victim, number), ["completed"])
    assert reasons == expected
    tags = [tag for attempt in run.attempts() for tag in attempt["tags"]]
    assert all(reason in tags for reason in reasons)
    if len(reasons) == 2:
        print(f"{victim} {number.name}: {began_to_train(run, 2) - at:.1f} s")


def began_to_train(run: PoolRun, attempt: int) -> float:
    """When the first chunk of an attempt began, as its log says; a chunk takes half a second."""
    journal = run.journal()
    first = next(commit for commit in map(journal.read_commit, journal.numbers("commits")) if commit.attempt == attempt)
    return journal.store.modified(f"commits/{first.number:08d}.json").timestamp()
