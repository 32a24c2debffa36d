"""Tests of flows called from Python: without a configured API they use the commands' temporary server."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import ROOT, Driver, MakeHome, await_ended, kill_tree

pytestmark = pytest.mark.slow

TRAINED_WITHIN_S = 240

CALL = """
from flows.train import train
from holdfast.config import load_config
result = train(load_config({path!r}))
print("complete:", result.complete, result.steps)
"""


def start(folder: Path, **environment: str) -> "tuple[Driver, subprocess.Popen[str]]":
    """Start a Python program that trains the toy, in a new user's environment."""
    driver = Driver(folder, {})
    known = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    known |= {"HOME": str(folder), "PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", CALL.format(path=str(driver.config))],
        env=known, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return driver, process


@pytest.mark.parametrize("name", ["audit", "evaluate", "prune"])
def test_a_flow_that_is_no_command_names_the_one_that_is(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", f"flows.{name}", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error == f"error: python -m flows.{name} is gone"
    assert hint.startswith(f"hint: holdfast {name} STORE/RUN ")


def test_a_killed_call_leaves_no_process_and_a_second_call_completes_the_run(
    tmp_path: Path, make_home: MakeHome
) -> None:
    make_home(tmp_path / "prefect")
    driver, process = start(tmp_path, TOY_DELAY_S="0.2")
    journal = Journal(open_store(driver.store), "toy")
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + TRAINED_WITHIN_S
        while not journal.newest_number():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        await_ended(started)
        _, process = start(tmp_path)
        out, err = process.communicate(timeout=TRAINED_WITHIN_S)
        assert (process.returncode, out) == (0, "complete: True 30\n"), err
    finally:
        for each in [*started, process]:
            kill_tree(each.pid)
        process.communicate()
