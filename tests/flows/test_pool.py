"""Tests on a work pool, with a real server and real workers: whatever dies, the run ends on the right bytes."""

import functools
import itertools
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from deployments import local
from deployments.ledger import launch_process
from holdfast.errors import RunStopped
from holdfast.journal import REPORT, record_name
from holdfast.testing.faults import fault
from tasks.server import free_port
from tests.conftest import IN_SOAK, IS_SOAK, Driver, MakeHome, Reference, await_ended, kill_tree
from tests.support.forging import plant, rename_recipe
from tests.support.pools import ENDS_WITHIN_S, Pool, PoolRun, await_true, pool_up, strike
from tests.support.processes import variables_of

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.pool]

STEPS = 30
CHUNK = 4
DELAY = "0.1"  # seconds, of each of them
AWAY_S = 15.0  # longer than the window of an automation
VICTIMS = ("attempt", "ranks", "worker", "machine")
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
# Each test takes half a minute. test_a_run_survives_deaths_during_a_save also kills a rank and an attempt by SIGKILL.
ALWAYS = {("machine", signal.SIGKILL)}
DEATHS = [each for each in itertools.product(VICTIMS, SIGNALS) if IS_SOAK or each in ALWAYS]
names = itertools.count(1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, make_home: MakeHome) -> Iterator[Pool]:
    with pool_up(make_home(tmp_path_factory.mktemp("pool")), TOY_DELAY_S=DELAY) as pool:
        yield pool


@pytest.fixture
def forgetful(pool: Pool) -> Iterator[None]:
    """Delete the server's automations while the test runs. An updated automation has also forgotten its flow runs."""
    pool.delete_automations()
    yield
    pool.make_automations()


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


def test_a_run_started_from_the_form_completes(run: PoolRun, reference: Reference) -> None:
    run.hurry()
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
    chunk = "chunk 1: steps 0-4"  # Prefect sends logs from time to time, and when the process ends
    await_true(lambda: chunk in run.pool.logs(attempt["id"]), f"the attempt did not log: {chunk}", ENDS_WITHIN_S)
    committed = [4, 8, 10, 14, 18, 20, 24, 28, 30]
    events = run.pool.await_events(len(committed), "holdfast.commit", f"{run.store}/{run.name}")
    assert sorted(event["payload"]["step"] for event in events) == committed


def test_a_rehearsed_run_says_so_in_a_line(run: PoolRun, reference: Reference) -> None:
    run.hurry()
    train = run.pool.await_end(run.start(proof={"rehearse": "first"}))
    assert train["state"]["name"] == "Completed", train["state"]
    assert_right_bytes(run, reference)
    (summary,) = run.pool.artifacts(train["id"])
    assert "continues exactly: rehearsed from step" in summary["data"]
    (attempt,) = run.attempts()
    line = re.compile(
        r"rehearsed: new ranks trained steps? \S+ from (step|commit) \d+.* exactly as the running ranks did"
    )
    await_true(lambda: bool(line.search(run.pool.logs(attempt["id"]))), "no rehearsal was logged", ENDS_WITHIN_S)
    assert not re.search(r"died|killed|new ranks continue", run.pool.logs(attempt["id"]))


@IN_SOAK
def test_a_run_that_would_not_continue_exactly_is_not_tried_again(run: PoolRun) -> None:
    settings = {"proof": {"rehearse": "on", "share": 1}, "chunk": {"epochs": 1}, "settings": {"acts_after": 3}}
    train = run.pool.await_end(run.start(recipe="tests.support.forgetting:counting", **settings))
    assert train["state"]["name"] == "Failed"
    assert "this run would not continue exactly: first in step 9: model" in train["state"]["message"]
    assert [attempt["state"]["name"] for attempt in run.attempts()] == ["Inexact"]
    assert run.reasons() == [("inexact", 8)]


@pytest.mark.parametrize(("victim", "number"), DEATHS, ids=lambda value: getattr(value, "name", value))
def test_a_run_survives_a_death(run: PoolRun, reference: Reference, victim: str, number: signal.Signals) -> None:
    train = run.start()
    run.await_commits(1)
    engine, ranks = run.processes(1)
    time.sleep(random.Random(f"{victim} {number}").uniform(0, 1.5))
    worker = psutil.Process(run.pool.worker())
    struck = {"attempt": [engine], "ranks": ranks, "worker": [worker], "machine": [worker, engine, *ranks]}[victim]
    strike(struck, number)
    at = time.time()
    run.hurry()
    if worker in struck:
        await_ended([worker])
        run.pool.replace_worker()
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
    attempts = run.attempts()
    tags = [tag for attempt in attempts for tag in attempt["tags"]]
    assert all(reason in tags for reason in reasons)
    await_true(
        lambda: not run.pool.list_running_tasks(attempts), "a dead attempt's chunk is still Running", ENDS_WITHIN_S
    )
    at_most_redone = CHUNK if number == signal.SIGKILL and victim in ("ranks", "machine") else 0
    assert STEPS <= run.count_trained() <= STEPS + at_most_redone
    if len(reasons) == 2:
        journal = run.journal()
        committed = [journal.read_commit(number) for number in journal.numbers("commits")]
        assert run.reasons()[0][1] == max(commit.step for commit in committed if commit.attempt == 1)
        print(f"{victim} {number.name}: {find_first_commit_time(run, 2) - at:.1f} s")


def test_a_worker_that_is_told_to_end_lets_its_attempt_save(run: PoolRun, reference: Reference) -> None:
    psutil.Process(run.pool.worker()).kill()
    own = {"PREFECT_WORKER_WEBSERVER_PORT": str(free_port())}
    access = local.access(run.pool.ledger, run.pool.url)
    command = [sys.executable, "-m", "deployments.worker", "gpu"]
    launch_process(run.pool.ledger, "worker-gpu", command, run.pool.environment | access | own)
    train = run.start()
    run.await_commits(1)
    worker = psutil.Process(run.pool.worker())
    worker.terminate()
    await_ended([worker])
    run.pool.replace_worker()
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    assert [reason for reason, _ in run.reasons()] == ["preempted", "completed"]
    assert_right_bytes(run, reference)


@IN_SOAK
def test_a_death_without_automations_is_noticed(run: PoolRun, reference: Reference, forgetful: None) -> None:
    """The machine is gone and no automation notices it: train finds out by itself."""
    train = run.start()
    run.await_commits(1)
    at = time.monotonic()
    kill_machine(run)
    run.hurry()
    run.pool.replace_worker()
    run.await_attempt(2)
    print(f"the next attempt, {time.monotonic() - at:.1f} s after a death that no automation knows of")
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    assert run.attempts()[0]["state"]["name"] == "Vanished"
    assert [reason for reason, _ in run.reasons()] == ["vanished", "completed"]
    assert_right_bytes(run, reference)


@IN_SOAK
def test_a_cancelled_attempt_that_is_dead_does_not_hold_up_the_next_start(
    run: PoolRun, reference: Reference, forgetful: None
) -> None:
    """Besides, train logs that it waits for a worker."""
    train = run.start()
    run.await_commits(1)
    supervisor_of(run.pool, train).kill()
    kill_machine(run)
    run.hurry()
    (first,) = run.attempts()
    run.pool.cancel(first["id"])
    at = time.monotonic()
    again = run.start()
    waits = f"{run.name} attempt 2 waits for a worker of pool gpu"
    await_true(lambda: waits in run.pool.logs(again), f"train did not say: {waits}", ENDS_WITHIN_S)
    print(f"on, past a dead attempt that is Cancelling, and waiting: {time.monotonic() - at:.1f} s")
    run.pool.replace_worker()
    assert run.pool.await_end(again)["state"]["name"] == "Completed"
    assert run.pool.read(first["id"])["state"]["name"] == "Cancelled"
    assert [reason for reason, _ in run.reasons()] == ["cancelled", "completed"]
    assert_right_bytes(run, reference)


@IN_SOAK
def test_cancelled_without_its_worker_an_attempt_saves_and_ends(run: PoolRun, forgetful: None) -> None:
    train = run.start(epochs=30)
    run.await_commits(1)
    engine, ranks = run.processes(1)
    psutil.Process(run.pool.worker()).kill()
    run.pool.cancel(train)
    assert run.pool.await_end(train)["state"]["name"] == "Cancelled"
    await_ended([engine, *ranks])
    run.pool.replace_worker()
    (attempt,) = run.attempts()
    assert run.pool.await_end(attempt["id"])["state"]["name"] == "Cancelled"
    newest = run.journal().newest()
    assert newest is not None
    assert run.count_trained() == newest.step  # nothing that was trained is lost
    assert run.reasons() == [("cancelled", newest.step)]


@pytest.mark.skipif(not IS_SOAK, reason="a minute each: make soak")
@pytest.mark.parametrize("after_s", [0, 2, 4, 6, 8, 10, 12, 15, 20])
@pytest.mark.parametrize("is_forced", [False, True], ids=["make up", "an update of each automation"])
def test_make_up_after_a_death(run: PoolRun, reference: Reference, after_s: float, is_forced: bool) -> None:
    """An updated automation forgets for which flow runs it waits. `make up` updates changed automations."""
    train = run.start()
    run.await_commits(1)
    kill_machine(run)
    at = time.monotonic()
    run.pool.replace_worker()
    time.sleep(after_s)
    if is_forced:
        run.pool.delete_automations()
    run.pool.make_up()
    run.await_attempt(2)
    print(f"the next attempt, {time.monotonic() - at:.1f} s after the blow")
    assert time.monotonic() - at < 60
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    assert [reason for reason, _ in run.reasons()] == ["vanished", "completed"]
    assert_right_bytes(run, reference)


def test_a_run_survives_deaths_during_a_save(run: PoolRun, reference: Reference) -> None:
    """SIGKILL of a rank between two writes of its second checkpoint, then of the attempt before it has committed."""
    try:
        run.pool.replace_worker(**fault("payload-written", 2, "self", run.folder / "one"))
        train = run.start()
        run.await_commits(3)
        run.pool.replace_worker(**fault("chunk-reported", 2, "both", run.folder / "two"))
        run.hurry()
        state = run.pool.await_end(train)["state"]
    finally:
        run.pool.replace_worker()
    assert state["name"] == "Completed"
    assert (run.folder / "one").exists()
    assert (run.folder / "two").exists()
    assert_right_bytes(run, reference)
    assert {reason for reason, _ in run.reasons()} == {"vanished", "crashed", "completed"}


@IN_SOAK
def test_a_death_at_the_last_commit_leaves_nothing_undone(run: PoolRun, reference: Reference) -> None:
    """Another attempt does what comes after the last commit, with nothing to train; a third start finds it done."""
    struck = run.folder / "struck"
    try:
        run.pool.replace_worker(**fault("commit-recorded", reference.commits, "both", struck))
        train = run.start()
        run.hurry()
        state = run.pool.await_end(train)["state"]
    finally:
        run.pool.replace_worker()
    assert struck.exists()
    assert state["name"] == "Completed"
    assert_right_bytes(run, reference)
    journal = run.journal()
    assert run.reasons() == [("crashed", STEPS), ("completed", STEPS)]
    assert journal.store.exists(record_name("prunes", journal.newest_number()))
    assert b"<dd>complete</dd>" in journal.store.read(REPORT)
    assert run.pool.await_end(run.start())["state"]["name"] == "Completed"
    assert len(run.attempts()) == 2


@IN_SOAK
def test_two_starts_at_once(run: PoolRun, reference: Reference) -> None:
    trains = [run.start(), run.start()]
    assert [run.pool.await_end(train)["state"]["name"] for train in trains] == ["Completed", "Completed"]
    assert_right_bytes(run, reference)
    assert len(run.attempts()) == 1
    assert run.journal().attempts() == 1


def test_a_cancelled_run_saves_and_continues_when_started_again(run: PoolRun, reference: Reference) -> None:
    train = run.start()
    run.await_commits(1)
    run.pool.cancel(train)
    assert run.pool.await_end(train)["state"]["name"] == "Cancelled"
    ((reason, step),) = run.reasons()
    assert reason == "cancelled"
    assert 4 < step < STEPS
    newest = run.journal().newest()
    assert newest is not None
    assert run.count_trained() == newest.step  # nothing that was trained is lost
    (attempt,) = run.attempts()
    assert run.pool.await_end(attempt["id"])["state"]["name"] == "Cancelled"
    # Nothing of it looks like a crash.
    saved = f"cancelled by a person: step {step} is saved in {newest.path}; start the run again to continue"
    for flow_run in (train, attempt["id"]):
        await_true(functools.partial(run.pool.has_logged, flow_run, saved), f"no log says: {saved}", ENDS_WITHIN_S)
        assert "Crash detected" not in run.pool.logs(flow_run)
        assert "Traceback" not in run.pool.logs(flow_run)
        assert "CRASHED" not in {state["type"] for state in run.pool.states(flow_run)}
    # The UI shows a stop's commit like any other commit.
    await_true(lambda: newest.path in run.pool.logs(attempt["id"]), "its commit is not in the log", ENDS_WITHIN_S)
    shown = {artifact["key"]: artifact for artifact in run.pool.artifacts(attempt["id"])}
    assert newest.path in str(shown[f"{run.name}-chunks"]["data"])
    events = run.pool.await_events(newest.number, "holdfast.commit", f"{run.store}/{run.name}")
    assert newest.path in {event["payload"]["path"] for event in events}
    run.hurry()
    assert run.pool.await_end(run.start())["state"]["name"] == "Completed"
    assert_right_bytes(run, reference)


@IN_SOAK
def test_a_retried_attempt_is_refused_and_a_retried_train_continues_the_run(run: PoolRun, reference: Reference) -> None:
    train = run.start()
    run.await_commits(1)
    supervisor_of(run.pool, train).kill()
    engine, _ = run.processes(1)
    engine.kill()
    run.hurry()
    (first,) = run.attempts()
    run.pool.await_crash(train)
    run.pool.await_crash(first["id"])
    run.pool.retry(first["id"])
    run.pool.await_state(first["id"], "Stopped")
    refused = f"attempt 1 of run '{run.name}' can't begin a second time; start or retry train"
    assert run.pool.read(first["id"])["state"]["message"].startswith(refused)
    run.pool.retry(train)
    run.pool.await_state(train, "Completed")
    assert run.journal().attempts() == 2
    assert_right_bytes(run, reference)


@IN_SOAK
def test_a_train_that_watches_a_retried_attempt_continues_the_run(run: PoolRun, reference: Reference) -> None:
    """A person retries the attempt of a train that is dead. The next train finds it live, and must not give up."""
    train = run.start()
    run.await_commits(1)
    supervisor_of(run.pool, train).kill()
    run.pool.await_end(train)
    engine, _ = run.processes(1)
    psutil.Process(run.pool.worker()).kill()
    engine.kill()
    (first,) = run.attempts()
    run.pool.set_state(first["id"], "CRASHED", "Crashed")
    run.pool.retry(first["id"])
    again = run.start()
    run.pool.await_state(again, "Running")
    run.hurry()
    run.pool.replace_worker()
    assert run.pool.await_end(again)["state"]["name"] == "Completed"
    assert [reason for reason, _ in run.reasons()] == ["stopped", "completed"]
    assert_right_bytes(run, reference)


@IN_SOAK
def test_an_attempt_that_a_concurrency_limit_cancels_is_tried_again(run: PoolRun, reference: Reference) -> None:
    other = PoolRun(run.pool, run.folder, f"{run.name}-other")
    with run.pool.limited("attempt/gpu", "CANCEL_NEW"):
        busy = other.start(epochs=30)
        other.await_commits(1)
        train = run.start()
        waits = "attempt 1 did not begin (Deployment concurrency limit reached)"
        await_true(lambda: waits in run.pool.logs(train), f"train did not say: {waits}", ENDS_WITHIN_S)
        other.hurry()
        run.hurry()
        assert run.pool.await_end(train)["state"]["name"] == "Completed"
        assert run.pool.await_end(busy)["state"]["name"] == "Completed"
    states = [attempt["state"]["name"] for attempt in run.attempts()]
    assert {*states[:-1]} == {"Cancelled"}
    assert states[-1] == "Completed"
    assert run.reasons() == [("completed", STEPS)]
    assert_right_bytes(run, reference)


@pytest.mark.parametrize("flow", [pytest.param("train", marks=IN_SOAK), "attempt"])
def test_a_paused_run_resumes(run: PoolRun, reference: Reference, flow: str) -> None:
    train = run.start()
    run.await_commits(1)
    paused = train if flow == "train" else run.attempts()[0]["id"]
    run.pool.pause(paused)
    await_true(lambda: bool(run.reasons()), "it was not paused", ENDS_WITHIN_S)
    time.sleep(1)
    stopped_at = run.standing().step
    assert 4 < stopped_at < STEPS
    assert run.pool.read(paused)["state"]["name"] == "Suspended"
    time.sleep(3)
    assert run.standing().step == stopped_at
    run.hurry()
    run.pool.resume(paused)
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    assert_right_bytes(run, reference)
    first = {"train": "cancelled", "attempt": "paused"}[flow]
    assert [reason for reason, _ in run.reasons()] == [first, "completed"]


@IN_SOAK
def test_a_paused_attempt_that_is_resumed_and_lost_is_followed_by_another_one(
    run: PoolRun, reference: Reference
) -> None:
    """Its machine dies after the person resumed the flow run, and before that claimed an attempt of its own."""
    train = run.start()
    run.await_commits(1)
    paused = run.attempts()[0]["id"]
    run.pool.pause(paused)
    await_true(lambda: bool(run.reasons()), "it was not paused", ENDS_WITHIN_S)
    run.pool.await_state(paused, "Suspended")
    run.hurry()
    run.pool.set_state(paused, "CRASHED", "Vanished")
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    assert_right_bytes(run, reference)
    assert [reason for reason, _ in run.reasons()] == ["paused", "completed"]


def test_a_run_survives_the_death_of_train(run: PoolRun, reference: Reference) -> None:
    train = run.start()
    run.await_commits(1)
    supervisor_of(run.pool, train).kill()
    assert run.pool.await_end(train)["state"]["name"] == "Crashed"
    assert run.pool.await_end(run.start())["state"]["name"] == "Completed"
    assert_right_bytes(run, reference)
    assert run.reasons() == [("completed", STEPS)]


def test_a_recipe_that_fails_in_a_step_spends_its_budget(run: PoolRun) -> None:
    run.hurry()
    changes = {"settings": {"poison": 9}, "supervision": {"max_failures": 2}}
    train = run.pool.await_end(run.start(**changes))
    state = train["state"]
    assert state["name"] == "Failed"
    assert "NoProgress" in state["message"]
    (summary,) = (each for each in run.pool.artifacts(train["id"]) if each["key"] == f"{run.name}-summary")
    assert summary["data"].count("| recipe failed |") == len(run.attempts())
    assert "as it was told to" in summary["data"]
    assert "ZeroDivisionError: as it was told to" in state["message"]
    assert {reason for reason, _ in run.reasons()} == {"recipe_failed"}
    assert {attempt["state"]["name"] for attempt in run.attempts()} == {"Recipe failed"}


@pytest.mark.skipif(not IS_SOAK, reason="as a recipe that fails; test_wrong_use has it without a pool: make soak")
def test_a_recipe_without_enough_memory_spends_its_budget(run: PoolRun) -> None:
    changes = {"recipe": "tests.support.greedy:greedy", "supervision": {"max_failures": 1}}
    state = run.pool.await_end(run.start(**changes))["state"]
    assert state["name"] == "Failed"
    assert "out of memory in step" in state["message"]
    assert {reason for reason, _ in run.reasons()} == {"out_of_memory"}


@IN_SOAK
def test_a_pool_that_does_not_exist_is_named(run: PoolRun, reference: Reference) -> None:
    train = run.pool.await_end(run.start(where="nowhere"))
    assert train["state"]["type"] == "FAILED"
    line = 'where = "nowhere": Prefect\'s server has no deployment attempt/nowhere'
    assert line in train["state"]["message"]
    assert run.journal().attempts() == 0
    run.hurry()
    assert run.pool.await_end(run.start())["state"]["name"] == "Completed"  # the run is not lost
    assert_right_bytes(run, reference)


def test_wrong_use_is_not_tried_again(run: PoolRun) -> None:
    state = run.pool.await_end(run.start(settings={"widht": 4}))["state"]
    assert state["name"] == "Failed"
    assert "unknown key settings.widht" in state["message"]
    assert "did you mean width?" in state["message"]
    assert [attempt["state"]["name"] for attempt in run.attempts()] == ["Settings"]


@IN_SOAK
def test_other_settings_are_refused_by_a_run_that_another_train_has_completed(run: PoolRun) -> None:
    train = run.start(epochs=200, chunk={"epochs": 10})
    run.await_commits(1)
    other = run.start(settings={"lr": 0.5})
    warned = f"the flow run {run.name} attempt 1 trains the run with different settings"
    await_true(lambda: warned in run.pool.logs(other), "it did not warn", ENDS_WITHIN_S)
    run.hurry()
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    for each in (other, run.start(settings={"lr": 0.5})):
        state = run.pool.await_end(each)["state"]
        assert state["name"] == "Failed"
        assert "settings.lr: saved 0.05, now 0.5" in state["message"]
    assert run.pool.await_end(run.start())["state"]["name"] == "Completed"
    assert [reason for reason, _ in run.reasons()].count("completed") == 1


def test_a_value_out_of_range_is_refused_by_name(run: PoolRun) -> None:
    with pytest.raises(AssertionError, match=r"409.*epochs"):
        run.start(epochs=0)


def test_a_schedule_starts_a_run(run: PoolRun, reference: Reference) -> None:
    run.hurry()
    soon = datetime.now(UTC) + timedelta(seconds=15)
    schedule = run.pool.schedule("train/train", soon, config=run.config())
    try:
        deadline = time.monotonic() + 60
        while not run.pool.find("train", run.name):
            assert time.monotonic() < deadline, "nothing was started"
            time.sleep(0.5)
    finally:
        run.pool.unschedule("train/train", schedule)
    (train,) = run.pool.find("train", run.name)
    assert "auto-scheduled" in train["tags"]
    assert run.pool.await_end(train["id"])["state"]["name"] == "Completed"
    assert_right_bytes(run, reference)


def test_training_goes_on_while_the_server_is_away(run: PoolRun, reference: Reference) -> None:
    train = run.start(epochs=9)
    run.await_commits(1)
    run.pool.kill_server()
    steps = run.standing().step
    time.sleep(AWAY_S)
    await_true(lambda: run.standing().step > steps + 10, "nothing was trained", ENDS_WITHIN_S)
    run.pool.start_server()
    # The server was away for longer than the automation's window: it may call train and its attempt vanished.
    run.pool.await_state(train, "Completed")
    assert run.standing().step == 90
    assert_one_line(run)
    assert any("completed" in attempt["tags"] for attempt in run.attempts())


@IN_SOAK
def test_a_dropped_database_loses_nothing(run: PoolRun, reference: Reference) -> None:
    """`make up` makes a new one. The command says why it ends; started again, it continues the run."""
    driver = Driver(run.folder, local.access(run.pool.ledger, run.pool.url))
    settings = (f"run={run.name}", "where=gpu")
    command = driver.start(*settings)
    try:
        run.await_commits(1)
        run.pool.kill_server()
        for file in run.pool.ledger.folder.glob("prefect.db*"):
            file.unlink()
        run.pool.start_server()
        run.pool.make_up()
        _, err = command.communicate(timeout=ENDS_WITHIN_S)
    finally:
        kill_tree(command.pid)
    assert command.returncode == RunStopped.exit_code
    error, hint = err.splitlines()[-2:]
    assert error.startswith("error: Prefect's server no longer knows this flow run: its database was lost")
    assert hint.startswith("hint: the same command continues")
    done = driver.run(*settings)
    assert done.returncode == 0, done.stderr
    assert_right_bytes(run, reference)


@IN_SOAK
def test_flow_runs_that_are_called_vanished_say_that_they_live(run: PoolRun, reference: Reference) -> None:
    train = run.start()
    run.await_commits(1)
    (first,) = run.attempts()
    for flow_run in (train, first["id"]):
        run.pool.set_state(flow_run, "CRASHED", "Vanished")
    for flow_run in (train, first["id"]):
        run.pool.await_state(flow_run, "Running")
    run.hurry()
    run.pool.await_state(train, "Completed")
    assert run.journal().attempts() == 1
    assert_right_bytes(run, reference)


def test_a_false_alarm_leaves_one_line_of_commits(run: PoolRun, reference: Reference) -> None:
    """The server takes a stopped attempt for dead; the next attempt fences it off."""
    train = run.start()
    run.await_commits(1)
    engine, ranks = run.processes(1)
    (first,) = run.attempts()
    strike([engine, *ranks], signal.SIGSTOP)
    run.pool.set_state(first["id"], "CRASHED", "Vanished")
    run.await_attempt(2)
    run.hurry()
    strike([engine, *ranks], signal.SIGCONT)
    assert run.pool.await_end(train)["state"]["name"] == "Completed"
    await_ended([engine, *ranks])
    assert run.journal().attempts() == 2
    assert_right_bytes(run, reference)
    assert_one_line(run)


def test_a_sweep(run: PoolRun) -> None:
    config = run.config(epochs=1, retention={"keep_best": {"metric": "avg_loss"}})
    sweep = run.pool.start("sweep/sweep", config=config, grid={"settings.lr": [0.1, 0.01]}, at_once=2, pin_best=True)
    assert run.pool.await_end(sweep)["state"]["name"] == "Completed"
    (table,) = run.pool.artifacts(sweep)
    rows = json.loads(table["data"])
    assert [row["settings.lr"] for row in rows] == [0.1, 0.01]
    assert sorted(row["pinned"] for row in rows) == ["", "commit 3"]
    runs = [PoolRun(run.pool, run.folder, f"{run.name}-lr-{lr}") for lr in ("0.1", "0.01")]
    assert [each.standing().step for each in runs] == [10, 10]
    pins = [(each.standing().avg_loss, each.journal().numbers("pins")) for each in runs]
    assert [len(numbers) for _, numbers in sorted(pins)] == [1, 0]
    assert "settings.lr" in (run.folder / "runs" / f"{run.name}-sweep.html").read_text("utf-8")


def kill_machine(run: PoolRun) -> None:
    """Send SIGKILL to the worker, the attempt and its ranks at once."""
    engine, ranks = run.processes(1)
    worker = psutil.Process(run.pool.worker())
    strike([worker, engine, *ranks], signal.SIGKILL)
    await_ended([worker])


def supervisor_of(pool: Pool, train: str) -> psutil.Process:
    """Return the process of a flow run of train."""
    children = psutil.Process(pool.worker("stable")).children()
    (found,) = [child for child in children if train in variables_of(child).values()]
    return found


def assert_one_line(run: PoolRun) -> None:
    """Assert that each step counts once, and that each commit follows the one before."""
    journal = run.journal()
    commits = [journal.read_commit(number) for number in journal.numbers("commits")]
    assert [commit.parent for commit in commits] == [commit.number - 1 for commit in commits]
    lines = [
        line for name in journal.store.list("metrics") for line in journal.store.read(f"metrics/{name}").splitlines()
    ]
    assert [json.loads(line)["step"] for line in lines] == list(range(1, run.standing().step + 1))


def find_first_commit_time(run: PoolRun, attempt: int) -> float:
    """Return the time of an attempt's first commit, one chunk after it began to train."""
    journal = run.journal()
    first = next(commit for commit in map(journal.read_commit, journal.numbers("commits")) if commit.attempt == attempt)
    return journal.store.modified(f"commits/{first.number:08d}.json").timestamp()


def test_an_audit_of_a_store_executes_nothing_that_its_runs_name(run: PoolRun, tmp_path: Path) -> None:
    run.hurry()
    run.pool.await_end(run.start())
    mark, folder = tmp_path / "executed", Path(run.store) / run.name
    recipe = f"{plant(Path(run.store), mark)}:toy"
    rename_recipe(folder, recipe)
    said = f"the run's records name the recipe '{recipe}', whose file is in a store"
    for deployment, parameters in (("audit/audit", {}), ("evaluate/evaluate", {"run": run.name})):
        started = run.pool.start(deployment, store=run.store, **parameters)
        ended = run.pool.await_end(started)
        assert (ended["state"]["name"], mark.exists()) == ("Failed", False)
        await_true(lambda started=started: said in run.pool.logs(started), "it doesn't say why", ENDS_WITHIN_S)
