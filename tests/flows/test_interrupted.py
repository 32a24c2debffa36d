"""Tests of Ctrl-C, a closed terminal and a killed command: it ends soon, prints little and leaves no process."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import IN_SOAK, Driver, MakeHome, await_ended, kill_tree
from tests.support.lives import ranks_of
from tests.support.terminals import ENDS_WITHIN_S, Terminal

pytestmark = [pytest.mark.slow, pytest.mark.server]

CTRL_C = b"\x03"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, make_home: MakeHome) -> Path:
    """Return a folder in which all these tests share Prefect's database."""
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def alone(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return a driver of the toy for which no Prefect server is configured."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    return Driver(tmp_path, {"PREFECT_HOME": str(home), "TOY_DELAY_S": "0.2"})


@contextlib.contextmanager
def opened(driver: Driver) -> Iterator[Terminal]:
    """Train the run in a terminal and yield that terminal. Kill every process that is left afterwards."""
    terminal = Terminal(sys.executable, "-m", "flows.train", str(driver.config), **driver.environment)
    try:
        yield terminal
    finally:
        kill_tree(terminal.process.pid)
        terminal.process.wait()


def assert_quiet(shown: str) -> None:
    assert "Traceback" not in shown, shown
    assert "Error" not in shown, shown
    lines = [line for line in shown.splitlines() if line.strip() and "step" not in line]  # without the lines of the bar
    assert len(lines) <= 5, shown


def is_trained(driver: Driver) -> bool:
    return (driver.run_folder / "attempts" / "00000001.json").exists() and driver.journal().newest_number() >= 1


@pytest.mark.parametrize("presses", [pytest.param(1, marks=IN_SOAK), 2])
def test_ctrl_c_saves_and_ends_soon(alone: Driver, presses: int) -> None:
    with opened(alone) as terminal:
        terminal.await_true(lambda: is_trained(alone))
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        before = len(terminal.screen)
        for _ in range(presses):
            terminal.press(CTRL_C)
            time.sleep(0.2)
        assert terminal.finish() == 130, terminal.screen
        await_ended(started)
        assert_quiet(terminal.screen[before:])
        if presses == 1:
            (ending,) = alone.journal().endings()
            newest = alone.journal().newest()
            assert newest is not None
            assert (ending.reason, ending.step) == ("preempted", newest.step)
            assert "saved and committed" in terminal.screen


@pytest.mark.parametrize("library", ["_pydantic_core", "_pendulum"])
def test_ctrl_c_ends_a_command_that_still_imports(alone: Driver, library: str) -> None:
    with opened(alone) as terminal:
        maps = Path(f"/proc/{terminal.process.pid}/maps")
        terminal.await_true(lambda: library in maps.read_text())
        terminal.press(CTRL_C)
        assert terminal.finish() == 130, terminal.screen
        assert_quiet(terminal.screen)


def test_ctrl_c_ends_a_command_whose_ranks_and_server_start(alone: Driver) -> None:
    with opened(alone) as terminal:
        terminal.await_true(lambda: bool(ranks_of(terminal.process.pid)))
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.press(CTRL_C)
        assert terminal.finish() == 130, terminal.screen
        await_ended(started)
        assert_quiet(terminal.screen)


@pytest.mark.parametrize("death", ["SIGKILL", pytest.param("closed", marks=IN_SOAK)])
def test_a_dead_command_leaves_nothing_that_runs_or_prints(alone: Driver, death: str) -> None:
    with opened(alone) as terminal:
        terminal.await_true(lambda: is_trained(alone))
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        before = len(terminal.screen)
        if death == "closed":
            terminal.close()
        else:
            terminal.process.send_signal(signal.SIGKILL)
        assert terminal.process.wait(ENDS_WITHIN_S) == (143 if death == "closed" else -signal.SIGKILL)
        await_ended(started)
        if death == "closed":  # SIGHUP lets it save
            assert [ending.reason for ending in alone.journal().endings()] == ["preempted"]
        terminal.read()
        assert_quiet(terminal.screen[before:])
