"""Ctrl-C, a closed terminal and a killed command, in a terminal of their own: few words, soon, and nothing is left."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, Driver, kill_tree, ranks_of

pytestmark = [pytest.mark.slow, pytest.mark.server]

BEGINS_WITHIN_S = 120.0
# On a busy machine. Where Ctrl-C reaches Prefect's server the command waits for more than 100 s.
ENDS_WITHIN_S = 60.0
CTRL_C = b"\x03"


class Terminal:
    """A command in a terminal of its own, and what is on the screen."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, env=os.environ | environment, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def read(self, within_s: float = 0.1) -> None:
        """Add to the screen what was printed meanwhile."""
        with contextlib.suppress(OSError):  # the terminal is closed
            while select.select([self._master], [], [], within_s)[0] and (data := os.read(self._master, 65536)):
                self.screen += data.decode(errors="replace")
                within_s = 0

    def await_true(self, is_so: Callable[[], bool], within_s: float = BEGINS_WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not is_so():
            self.read()
            assert self.process.poll() is None, self.screen
            assert time.monotonic() < deadline, self.screen

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        """Close the window: the process is told by SIGHUP."""
        os.close(self._master)

    def finish(self) -> int:
        """Return the exit code, once the process has ended."""
        deadline = time.monotonic() + ENDS_WITHIN_S
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline, f"it goes on after {ENDS_WITHIN_S:.0f} s; the screen: {self.screen}"
        self.read()
        return self.process.returncode


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Prefect's database is made once for all these tests."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def alone(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The toy's run, where no Prefect server is configured."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    return Driver(tmp_path, {"PREFECT_HOME": str(home), "TOY_DELAY_S": "0.2"})


@contextlib.contextmanager
def opened(driver: Driver) -> Iterator[Terminal]:
    """Yield the terminal in which the run is trained; nothing is left of it afterwards, whatever happens."""
    terminal = Terminal(sys.executable, "-m", "flows.train", str(driver.config), **driver.environment)
    try:
        yield terminal
    finally:
        kill_tree(terminal.process.pid)
        terminal.process.wait()


def assert_quiet(shown: str) -> None:
    assert "Traceback" not in shown, shown
    assert "Error" not in shown, shown
    lines = [line for line in shown.splitlines() if line.strip() and "step" not in line]  # without the bar's
    assert len(lines) <= 5, shown


def is_trained(driver: Driver) -> bool:
    return (driver.run_folder / "attempts" / "00000001.json").exists() and driver.journal().newest_number() >= 1


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_saves_and_ends_soon(alone: Driver, presses: int) -> None:
    with opened(alone) as terminal:
        terminal.await_true(lambda: is_trained(alone))
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        before = len(terminal.screen)
        for _ in range(presses):
            terminal.press(CTRL_C)
            time.sleep(0.2)
        assert terminal.finish() == 130
        _, left = psutil.wait_procs(started, timeout=ENDS_WITHIN_S)
        assert not left
        assert_quiet(terminal.screen[before:])
        if presses == 1:
            (ending,) = alone.journal().endings()
            newest = alone.journal().newest()
            assert newest is not None
            assert (ending.reason, ending.step) == ("preempted", newest.step)
            assert "saved and committed" in terminal.screen


def test_ctrl_c_ends_a_command_that_still_starts(alone: Driver) -> None:
    for starting_s in (0.5, 2.0):
        with opened(alone) as terminal:
            time.sleep(starting_s)
            terminal.press(CTRL_C)
            assert terminal.finish() == 130
            assert_quiet(terminal.screen)


def test_ctrl_c_ends_a_command_whose_ranks_and_server_start(alone: Driver) -> None:
    with opened(alone) as terminal:
        terminal.await_true(lambda: bool(ranks_of(terminal.process.pid)))
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.press(CTRL_C)
        assert terminal.finish() == 130
        _, left = psutil.wait_procs(started, timeout=ENDS_WITHIN_S)
        assert not left
        assert_quiet(terminal.screen)


@pytest.mark.parametrize("death", ["SIGKILL", "closed"])
def test_a_dead_command_leaves_nothing_that_runs_or_prints(alone: Driver, death: str) -> None:
    with opened(alone) as terminal:
        terminal.await_true(lambda: is_trained(alone))
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        before = len(terminal.screen)
        if death == "closed":
            terminal.close()
        else:
            terminal.process.send_signal(signal.SIGKILL)
        assert terminal.process.wait(ENDS_WITHIN_S) == (-signal.SIGHUP if death == "closed" else -signal.SIGKILL)
        _, left = psutil.wait_procs(started, timeout=ENDS_WITHIN_S)
        assert not left
        terminal.read()
        assert_quiet(terminal.screen[before:])
