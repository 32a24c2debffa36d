"""A pool of three machines, one of which computes wrongly from a step on: the run ends on a healthy run's bytes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments import local
from deployments.ledger import ProcessLedger, launch_process
from holdfast.extensions.quarantine.records import list_quarantined
from holdfast.journal import Journal
from holdfast.machine.host import VARIABLE
from holdfast.store import open_store
from tests.conftest import MakeHome, Reference
from tests.support.flipping import faulty
from tests.support.pools import ENDS_WITHIN_S, Pool, PoolRun, await_true, served

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.pool, pytest.mark.timeout(1500)]

WRONG, OTHERS = "node-1", ("node-2", "node-3")
UNPROBED = {"training_probe": False}
PATIENT = {"hangs": {"hung_after_s": 3600}}  # the machine waits until it is found
FLIPS_AT = 9  # commits end with the steps 4, 8, 10 and 14: the first two are right


@pytest.fixture
def pool(tmp_path: Path, make_home: MakeHome, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Yield a pool whose only worker so far is the one that starts attempts."""
    # A second audit waits for the first one's end, and by default looks for it each 30 seconds.
    monkeypatch.setenv("PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS", "1")
    with served(Pool(ProcessLedger(make_home(tmp_path / "pool")), faulty(WRONG, FLIPS_AT))) as pool:
        pool.set_up()
        pool.start_worker("stable")
        yield pool


def start_machine(pool: Pool, host: str, **variables: str) -> None:
    """Start a worker that has a machine of its own, and runs one flow run at a time as on a GPU."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool", "gpu"]
    command += ["--name", host, "--limit", "1"]
    own = {VARIABLE: host, "PREFECT_WORKER_QUERY_SECONDS": str(local.QUERY_EVERY_S)}
    launch_process(pool.ledger, host, command, pool.environment | local.access(pool.ledger, pool.url) | own | variables)


def test_a_run_whose_machine_computes_wrongly_ends_on_the_right_bytes(
    pool: Pool, tmp_path: Path, reference: Reference
) -> None:
    """Nobody does anything after the start. The machine only waits in a step while the others audit what it has done,
    so that it is still training when it is found.
    """
    run, held = PoolRun(pool, tmp_path, "toy"), tmp_path / "held"
    start_machine(pool, WRONG, TOY_HELD=str(held), TOY_DELAY_S="0.2")
    train = run.start(
        recipe="tests.support.flipping:flipping", retention={"keep_last": 99}, resume=UNPROBED, extensions=PATIENT
    )
    run.await_commits(4)
    held.touch()
    for host in OTHERS:
        start_machine(pool, host)
    pool.start("audit/audit", store=run.store, commits=99, on_fault="rollback")  # as the schedule does every night
    store = open_store(run.store)
    await_true(lambda: bool(list_quarantined(store)), "no machine was found", ENDS_WITHIN_S)
    assert [record.host for record in list_quarantined(store)] == [WRONG]
    await_true(lambda: run.journal().is_quarantined(4), "the run was not rolled back", ENDS_WITHIN_S)
    held.unlink()
    assert pool.await_end(train)["state"]["name"] == "Completed"
    assert [reason for reason, _ in run.reasons()] == ["machine_quarantined", "completed"]
    assert_found(run.journal())
    assert run.standing().checkpoint_sha256 == reference.standing.checkpoint_sha256


def assert_found(journal: Journal) -> None:
    """Assert that all commits of the wrong machine since its first wrong one were trained again on another one."""
    first, second = map(journal.read_attempt, (1, 2))
    assert first.host == WRONG
    assert second.host in OTHERS
    done = [journal.read_commit(number) for number in journal.numbers("commits")]
    wrong = [commit for commit in done if commit.attempt == 1 and commit.step >= FLIPS_AT]
    assert all(journal.is_quarantined(commit.number) for commit in wrong)
    right = {commit.step: commit for commit in journal.candidates()}
    assert [right[step].attempt for step in (4, 8, 10)] == [1, 1, 2]
    assert right[10].checkpoint_sha256 != wrong[0].checkpoint_sha256
