"""Tests that nothing is sent home: a proxy that answers nothing records every attempt to connect."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK, ROOT, Driver, kill_tree
from tests.support.forging import plant_shadows
from tests.support.terminals import BEGINS_WITHIN_S, Terminal

pytestmark = [pytest.mark.slow, pytest.mark.server]

PYTHON = sys.executable
PREFECT = [PYTHON, "-m", "prefect"]


@dataclass
class Trap:
    """A proxy that records the hosts that processes tried to reach."""

    port: int = 0
    asked: list[str] = field(default_factory=list)

    def environment(self, folder: Path, **more: str) -> dict[str, str]:
        """Return a new user's environment, with no setting for usage data."""
        proxy = f"http://127.0.0.1:{self.port}"
        return {
            "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), "TERM": "xterm",
            "PYTHONWARNINGS": "ignore", "HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "https_proxy": proxy,
            "http_proxy": proxy, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **more,
        }  # fmt: skip

    def run(
        self,
        folder: Path,
        command: list[str],
        within_s: float | None = None,
        until: Callable[[], bool] = bool,
        begun: str = "",
        **more: str,
    ) -> str:
        """Run a command in a terminal, outside of the repository's folder. Return its output.

        Args:
            within_s: the seconds after which the command is ended, if it still runs.
            until: end the command earlier, as soon as this returns true.
            begun: the output with which those seconds begin.
        """
        assigned = [f"{name}={value}" for name, value in self.environment(folder, **more).items()]
        terminal = Terminal("env", "-i", "-C", str(folder), *assigned, *command)
        try:
            if within_s is None:
                assert terminal.finish(BEGINS_WITHIN_S) == 0, terminal.screen
            else:
                terminal.await_true(lambda: begun in terminal.screen)
                with contextlib.suppress(AssertionError):
                    terminal.await_true(until, within_s)
        finally:
            kill_tree(terminal.process.pid)
            terminal.process.wait()
        return terminal.screen


@pytest.fixture
def trap() -> Iterator[Trap]:
    trap = Trap()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        trap.port = listener.getsockname()[1]

        def listen() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        trap.asked.append(connection.recv(4096).decode(errors="replace").partition("\r")[0])

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield trap
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_trap_records_what_prefect_sends_by_default(tmp_path: Path, trap: Trap) -> None:
    """Without our module, Prefect's own temporary server sends usage data, and the trap records it."""
    start = "from prefect import flow\n@flow\ndef say(): pass\nsay()"
    trap.run(tmp_path, [PYTHON, "-c", start], within_s=90, until=lambda: bool(trap.asked))
    assert any("prefect.io" in asked or "amplitude.com" in asked for asked in trap.asked)


@pytest.mark.parametrize("module", ["train", *["attempt", "sweep"] * IS_SOAK])
def test_importing_a_flow_sends_nothing(tmp_path: Path, trap: Trap, module: str) -> None:
    program = f"import flows.{module}; print('imported'); input()"
    printed = trap.run(tmp_path, [PYTHON, "-c", program], within_s=5, begun="imported")
    assert "anonymous usage data" not in printed
    assert trap.asked == []


def test_training_sends_nothing_and_imports_nothing_of_the_current_folder(tmp_path: Path, trap: Trap) -> None:
    """The service of the temporary server would send usage data as soon as it starts."""
    driver = Driver(plant_shadows(tmp_path), {})
    printed = trap.run(tmp_path, [PYTHON, "-P", "-m", "flows.train", str(driver.config)])
    assert "run toy is complete" in printed
    assert "anonymous usage data" not in printed
    assert trap.asked == []


def test_a_worker_of_another_machine_sends_nothing(tmp_path: Path, trap: Trap, prefect_api: dict[str, str]) -> None:
    """Start the worker as the README does. The worker asks the server, which answers that usage data is off."""
    reach = {name: prefect_api[name] for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}
    trap.run(tmp_path, [*PREFECT, "work-pool", "create", "gpu", "--type", "process", "--overwrite"], **reach)
    start = [*PREFECT, "worker", "start", "--pool", "gpu", "--type", "process"]
    printed = trap.run(tmp_path, start, within_s=10, begun="started", **reach)
    assert "started" in printed
    assert trap.asked == []
