"""Signals that tell a command to end: twice, in the run's last step, and while a step can't end in time."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import (
    COMMAND_WITHIN_S,
    MICRO_BATCHES,
    Driver,
    Reference,
    assert_same_bytes,
    count_shadows,
    count_trained,
    kill_tree,
)
from tests.support.lives import Command

pytestmark = pytest.mark.slow

Start = Callable[..., Command]


@pytest.fixture(params=["holdfast train", "flows.train"])
def start(request: pytest.FixtureRequest, driver: Driver, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a command which trains the toy; end what is left of them."""
    processes: list[Command] = []

    def start(*settings: str, **environment: str) -> Command:
        (tmp_path / "trained").mkdir(exist_ok=True)
        options = [option for setting in ("resume.training_probe=false", *settings) for option in ("--set", setting)]
        variables = driver.environment | {"TOY_TRAINED": str(tmp_path / "trained")} | environment
        arguments = [str(driver.config), *options]
        if request.param == "flows.train":
            processes.append(driver.nursery.start_flow("flows.train", arguments, dict(os.environ) | variables))
        else:
            command = "tests.support.forked:main", "train", *arguments
            processes.append(driver.nursery.start_command(*command, environment=dict(os.environ) | variables))
        return processes[-1]

    yield start
    for process in processes:
        kill_tree(process.pid)
        process.wait()


def await_micro_batches(driver: Driver, number: int) -> None:
    deadline = time.monotonic() + COMMAND_WITHIN_S
    trained = driver.folder / "trained" / "toy"
    while not trained.exists() or len(trained.read_text()) < number:
        assert time.monotonic() < deadline, f"there was no micro-batch {number}"
        time.sleep(0.01)


def test_a_second_sigterm_does_not_end_the_save_of_the_first(start: Start, driver: Driver) -> None:
    """As Slurm sends them to a job under srun, within 0.1 s."""
    process = start(TOY_DELAY_S="0.3")
    await_micro_batches(driver, 5 * MICRO_BATCHES + 1)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    out = "".join(process.communicate(timeout=COMMAND_WITHIN_S))
    assert process.returncode == 128 + signal.SIGTERM, out
    newest = driver.journal().newest()
    assert newest is not None
    assert newest.step >= 6
    assert count_trained(driver.folder / "trained", "toy") == newest.step + count_shadows(driver.journal())
    assert [ending.reason for ending in driver.journal().endings()] == ["preempted"]
    assert f"stopped after step {newest.step}, which is saved" in out


def test_a_run_that_ends_in_its_last_step_is_complete(start: Start, driver: Driver, reference: Reference) -> None:
    process = start(TOY_DELAY_S="0.12")
    await_micro_batches(driver, reference.standing.step * MICRO_BATCHES - 1)
    process.send_signal(signal.SIGTERM)
    out = "".join(process.communicate(timeout=COMMAND_WITHIN_S))
    assert process.returncode == 0, out
    assert [ending.reason for ending in driver.journal().endings()] == ["completed"]
    assert_same_bytes(driver, reference)
    assert "run toy is complete" in out


def test_steps_that_could_not_be_saved_are_named(start: Start, driver: Driver, reference: Reference) -> None:
    held = driver.folder / "held"
    process = start("resume.stop_within_s=2", "chunk.steps=8", TOY_DELAY_S="0.1", TOY_HELD=str(held))
    await_micro_batches(driver, 5 * MICRO_BATCHES)
    held.touch()
    while not list(driver.folder.glob("held.*.waits")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out = "".join(process.communicate(timeout=COMMAND_WITHIN_S))
    assert process.returncode == 128 + signal.SIGTERM, out
    assert driver.journal().newest() is None
    trained = len((driver.folder / "trained" / "toy").read_text()) // MICRO_BATCHES
    assert f"stopped at step {trained}, but steps 1-{trained} could not be saved within" in out
    assert "which is saved" not in out
    held.unlink()
    driver.finish()
    assert_same_bytes(driver, reference)
