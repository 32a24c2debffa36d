"""``holdfast train``: a whole life of a run from a shell, without Prefect."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.endings import Ending
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, ROOT

pytestmark = pytest.mark.slow


def start(config: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "holdfast.cli", "train", str(config), *arguments]
    environment = os.environ | {"TOY_DELAY_S": "0.05", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=config.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text('recipe = "tests.support.toy:toy"\nrun = "toy"\nepochs = 3\n[chunk]\nsteps = 4\n[log]\nevery = 1\n')
    return path


def journal_of(config: Path) -> Journal:
    return Journal(open_store(str(config.parent / "runs")), "toy")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_end_it_saves_and_the_same_command_finishes(config: Path, number: signal.Signals, code: int) -> None:
    journal = journal_of(config)
    process = start(config)
    deadline = time.monotonic() + COMMAND_WITHIN_S
    while not journal.newest_number():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert process.returncode == code, err
    assert "Traceback" not in err
    newest = journal.newest()
    assert newest is not None
    assert newest.why == "preempted"
    assert journal.endings() == [Ending("preempted", "told to end by a signal", newest.step)]

    out, err = start(config, "--json").communicate(timeout=COMMAND_WITHIN_S)
    result = json.loads(out)
    assert (result["complete"], result["steps"], result["resumed_from_epoch"]) == (True, 30, newest.epoch)
    assert f"attempt 2 (preempted): continues from {newest.path}" in err
    out, _ = start(config).communicate(timeout=COMMAND_WITHIN_S)
    assert out.startswith("run toy is complete: step 30, epoch 3\n")
    assert journal.attempts() == 2, "a complete run is not claimed again"


def test_wrong_use_is_one_line(config: Path) -> None:
    process = start(config, "--set", "epoch=3")
    out, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: ")
    assert "epochs" in err
    assert "Traceback" not in err
