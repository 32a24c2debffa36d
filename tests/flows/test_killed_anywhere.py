"""Tests of kills at any moment: the same command then finishes the run on the same bytes."""

import itertools
import json
import random
import signal
import time

import pytest

from holdfast.journal import REPORT, record_name
from holdfast.keeping.verification import verify_run
from holdfast.machine.faults import POINTS
from holdfast.testing.faults import fault
from tests.conftest import (
    COMMAND_WITHIN_S,
    IS_SOAK,
    Driver,
    Engine,
    Reference,
    assert_same_bytes,
    await_ended,
    count_shadows,
    count_trained,
    has_not_ended,
)
from tests.support.lives import ranks_of
from tests.support.vanishing import FAULTS, PAUSE_S

pytestmark = pytest.mark.slow

# The span of random kills: from before the ranks are ready to after the last commit of a run that trains for 1 s.
LATEST_KILL_S = 3.0
LATEST_KILL_OF_THE_ENGINE_S = 1.5
# Steps of a chunk in the configuration of `Driver`.
CHUNK = 4

VICTIMS = ("self", "other", "both")
EVERYWHERE = list(itertools.product(POINTS, VICTIMS))
# Every point and every victim is among them. make soak has every combination.
COVERING = list(zip(POINTS, itertools.cycle(VICTIMS), strict=False))
THROUGH_THE_FLOW = EVERYWHERE if IS_SOAK else COVERING[::4]


@pytest.mark.gpus(1)
@pytest.mark.parametrize(("point", "victim"), EVERYWHERE if IS_SOAK else COVERING)
def test_a_run_survives_a_kill_at_a_named_point(engine: Engine, reference: Reference, point: str, victim: str) -> None:
    kill_at(engine, engine, reference, point, victim)


@pytest.mark.parametrize(("point", "victim"), THROUGH_THE_FLOW)
def test_a_flow_survives_a_kill_at_a_named_point(
    driver: Driver, engine: Engine, reference: Reference, point: str, victim: str
) -> None:
    kill_at(driver, engine, reference, point, victim)


@pytest.mark.parametrize("point", POINTS if IS_SOAK else POINTS[::2])
def test_a_run_survives_a_kill_at_its_last_commit(engine: Engine, reference: Reference, point: str) -> None:
    """The attempt that follows has nothing to train, and does all that comes after the commit's record."""
    kill_at(engine, engine, reference, point, "both", reference.commits)
    assert_finished(engine, ["vanished", "completed"])
    engine.finish()  # nothing is left to do
    assert_finished(engine, ["vanished", "completed"])


def test_a_run_survives_a_kill_between_its_ending_and_its_report(engine: Engine, reference: Reference) -> None:
    done = engine.call("train_until_ended", str(engine.config))
    assert done.returncode == -signal.SIGKILL, done.stderr
    engine.finish()
    assert_finished(engine, ["completed"])
    assert_same_bytes(engine, reference)


def test_a_flow_survives_a_kill_at_its_last_commit(driver: Driver, reference: Reference) -> None:
    kill_at(driver, driver, reference, "commit-recorded", "both", reference.commits)
    assert_finished(driver, ["vanished", "completed"])


def assert_finished(driver: Driver, endings: list[str]) -> None:
    """Assert that all is done that comes after the last commit: endings, a prune, the report of the run's end."""
    journal = driver.journal()
    assert [ending.reason for ending in journal.endings()] == endings
    assert (driver.run_folder / record_name("prunes", journal.newest_number())).exists()
    page = (driver.run_folder / REPORT).read_text("utf-8")
    assert "<dd>complete</dd>" in page
    assert page.count(">completed</span>") == 1
    assert verify_run(journal).ok


def kill_at(driver: Driver, engine: Driver, reference: Reference, point: str, victim: str, nth: int = 2) -> None:
    """Kill the driver's run at the nth pass of a named point; finish the run with the engine."""
    struck = driver.folder / "struck"
    done = driver.run(**fault(point, nth, victim, struck))
    assert struck.exists(), done.stderr
    engine.finish()
    assert_same_bytes(engine, reference)


@pytest.mark.parametrize("victim", ["self", "rank", "both"])
@pytest.mark.parametrize("seed", range(40 if IS_SOAK else 1))
def test_a_run_survives_kills_at_random_moments(engine: Engine, reference: Reference, victim: str, seed: int) -> None:
    moments = random.Random(f"{victim} {seed}")
    for _ in range(3):
        after_s = moments.uniform(0.1, LATEST_KILL_OF_THE_ENGINE_S)
        engine.call("train_until_killed", str(engine.config), victim, after_s)
    engine.finish()
    assert_same_bytes(engine, reference)


@pytest.mark.parametrize("victim", ["flow", "rank", "both"] if IS_SOAK else ["both"])
@pytest.mark.parametrize("seed", range(20 if IS_SOAK else 1))
def test_a_flow_survives_kills_at_random_moments(
    driver: Driver, engine: Engine, reference: Reference, victim: str, seed: int
) -> None:
    moments = random.Random(f"{victim} {seed}")
    for _ in range(3):
        process = driver.start(TOY_DELAY_S="0.02")
        time.sleep(moments.uniform(0.1, LATEST_KILL_S))
        ranks = ranks_of(process.pid)
        if victim in ("rank", "both"):
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        if victim in ("flow", "both"):
            process.kill()
        process.communicate(timeout=COMMAND_WITHIN_S)
        await_ended(ranks)
    engine.finish()
    assert_same_bytes(driver, reference)


@pytest.mark.gpus(1)
def test_killed_rank_is_replaced_within_the_attempt(driver: Driver, reference: Reference) -> None:
    process = driver.start(TOY_DELAY_S="0.05")
    driver.await_commits(2)
    for rank in ranks_of(process.pid):
        rank.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert process.returncode == 0, err
    assert "is complete" in out
    assert driver.standing().attempts == 1
    assert_same_bytes(driver, reference)


VANISHING = 'recipe="tests.support.vanishing:vanishing"'


def test_a_rank_killed_while_the_run_opens_is_replaced_within_the_attempt(driver: Driver) -> None:
    """The first rank was started ahead, while the command waited for its server."""
    struck = [driver.folder / place for place in ("import", "build")]
    faults = [(file.name, 0, 0, str(file)) for file in struck]
    done = driver.run(VANISHING, "epochs=1", **{FAULTS: json.dumps(faults)})
    assert done.returncode == 0, done.stderr
    assert all(file.exists() for file in struck), "a fault has missed"
    assert done.stderr.count("warning: the ranks ended: signal 9 (SIGKILL); new ranks replace these ranks") == 2, (
        done.stderr
    )
    assert driver.standing().attempts == 1


def test_a_rank_that_dies_each_time_a_run_opens_ends_the_command(driver: Driver) -> None:
    done = driver.run(VANISHING, **{FAULTS: json.dumps([("build", 0, 0, "")])})
    assert done.returncode == 3
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: the ranks ended: signal 9 (SIGKILL)")
    assert hint.startswith("hint: holdfast docs troubleshooting#")
    assert not driver.journal().attempts()


def test_sigterm_ends_a_command_whose_ranks_die_as_the_run_opens(driver: Driver) -> None:
    """No further rank is started, whether the signal comes while one starts or in the pause after its death."""
    process = driver.start(VANISHING, **{FAULTS: json.dumps([("build", 0, 0, "")]), PAUSE_S: "3"})
    ranks: set[int] = set()
    while len(ranks) < 2:
        assert process.poll() is None, process.communicate()
        ranks |= {rank.pid for rank in ranks_of(process.pid)}
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert process.returncode == 143, err
    assert "Traceback" not in err


@pytest.mark.gpus(1)
def test_orphans_save_themselves_and_are_adopted(driver: Driver, engine: Engine, reference: Reference) -> None:
    process = driver.start(TOY_DELAY_S="0.1")
    driver.await_commits(1)
    ranks = ranks_of(process.pid)
    time.sleep(0.3)
    process.kill()
    process.communicate()
    assert ranks
    await_ended(ranks)
    committed = driver.standing().step
    done = engine.run()
    assert "adopting" in done.stderr
    adopted = [commit for commit in driver.journal().candidates() if commit.why == "adopted"]
    assert done.returncode == 0
    assert all(commit.step > committed for commit in adopted)
    assert_same_bytes(driver, reference)


@pytest.mark.gpus(1)
@pytest.mark.parametrize(
    ("asked_by", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)]
)
def test_a_stopped_run_saves_its_current_step(
    driver: Driver, engine: Engine, reference: Reference, asked_by: signal.Signals, exit_code: int
) -> None:
    trained = driver.folder / "trained"
    trained.mkdir()
    # `count_trained` counts losses in training mode.
    process = driver.start("resume.training_probe=false", TOY_DELAY_S="0.1", TOY_TRAINED=str(trained))
    driver.await_commits(1)
    ranks = ranks_of(process.pid)
    time.sleep(0.3)
    process.send_signal(asked_by)
    _, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert process.returncode == exit_code, err
    assert "stopped after step" in err
    (log,) = (driver.folder / "logs" / "toy").glob("*.log")
    assert "Fatal Python error" not in log.read_text()
    assert not [rank for rank in ranks if has_not_ended(rank)]
    newest = driver.journal().newest()
    assert newest is not None
    assert count_trained(trained, "toy") == newest.step + count_shadows(driver.journal())  # nothing is lost
    assert newest.why == "preempted" or newest.step % CHUNK == 0  # it may have come to the end of a chunk just then
    engine.finish()
    assert driver.journal().read_attempt(2).why == "preempted"
    assert_same_bytes(driver, reference)
