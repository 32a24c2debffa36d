"""``holdfast train``: a whole life of a run from a shell, without Prefect."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.rank.launching import END_WITHIN_S
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, count_shadows, count_trained
from tests.support.lives import Command, Lives

pytestmark = pytest.mark.slow


Start = Callable[..., Command]


@pytest.fixture
def start(nursery: Lives, config: Path) -> Start:
    """Return a function that starts the command in the configuration's folder. test_wheel has Python start it."""

    def start(*arguments: str) -> Command:
        return nursery.start_command(
            "tests.support.forked:main", "train", str(config), *arguments,
            environment=os.environ | {"TOY_DELAY_S": "0.05", "TOY_TRAINED": str(config.parent)}, folder=config.parent,
        )  # fmt: skip

    return start


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text('recipe = "tests.support.toy:toy"\nrun = "toy"\nepochs = 3\n[chunk]\nsteps = 4\n[log]\nevery = 1\n')
    return path


LONG = """
import pathlib
import time
import torch
import holdfast

HERE = pathlib.Path(__file__).parent

def train(run: holdfast.Run, fails: bool = False) -> None:
    weight = torch.zeros(1)
    run.keep(weight=weight)
    for step in run.steps(per_epoch=2):
        weight += 1
    (HERE / "begun").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)
    if fails:
        raise OSError("the disk is full")
    (HERE / "saved").write_text(str(weight.item()))
"""


def await_begun(config: Path, process: Command) -> None:
    """Wait until the code after the loop of `LONG` runs."""
    deadline = time.monotonic() + COMMAND_WITHIN_S
    while not (config.parent / "begun").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def long(config: Path) -> Path:
    (config.parent / "long.py").write_text(LONG)
    config.write_text('recipe = "long.py:train"\nrun = "toy"\nepochs = 2\n[settings]\nfails = false\n')
    return config


def test_the_code_after_a_loop_may_take_long(start: Start, long: Path) -> None:
    process = start()
    await_begun(long, process)
    time.sleep(END_WITHIN_S + 0.5)  # ranks that were told to end have so long
    (long.parent / "go").touch()
    _, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert process.returncode == 0, err
    assert (long.parent / "saved").read_text() == "4.0"


def test_a_second_command_leaves_the_code_after_a_loop_alone(start: Start, long: Path) -> None:
    first = start()
    await_begun(long, first)
    second = start()
    out, err = second.communicate(timeout=COMMAND_WITHIN_S)
    assert second.returncode == 0, err
    assert "is complete" in out
    assert first.poll() is None
    (long.parent / "go").touch()
    _, err = first.communicate(timeout=COMMAND_WITHIN_S)
    assert first.returncode == 0, err
    assert (long.parent / "saved").exists()
    assert journal_of(long).attempts() == 1
    assert journal_of(long).endings() == [Ending("completed", "", 4)]


def test_code_after_a_loop_that_fails_is_told_of_a_complete_run(start: Start, long: Path) -> None:
    (long.parent / "go").touch()
    out, err = start("--set", "settings.fails=true").communicate(timeout=COMMAND_WITHIN_S)
    assert "is complete" in out
    assert "the run is complete, but the code after its loop failed" in err
    assert "long.py:18: OSError: the disk is full" in err


def test_a_signal_ends_the_code_after_a_loop(start: Start, long: Path) -> None:
    process = start()
    await_begun(long, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=COMMAND_WITHIN_S)
    assert process.returncode == 143
    assert not (long.parent / "saved").exists()
    assert journal_of(long).endings() == [Ending("completed", "", 4)]


def journal_of(config: Path) -> Journal:
    return Journal(open_store(str(config.parent / "runs")), "toy")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_end_it_saves_and_the_same_command_finishes(
    start: Start, config: Path, number: signal.Signals, code: int
) -> None:
    journal = journal_of(config)
    process = start("--set", "resume.training_probe=false")  # `count_trained` counts losses in training mode
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
    assert count_trained(config.parent, "toy") == newest.step + count_shadows(journal)  # nothing is lost
    assert newest.why == "preempted" or newest.step % 4 == 0  # it may have come to the end of a chunk just then
    assert journal.endings() == [Ending("preempted", "told to end by a signal", newest.step)]

    out, err = start("--json").communicate(timeout=COMMAND_WITHIN_S)
    result = json.loads(out)
    assert (result["complete"], result["steps"], result["resumed_from_epoch"]) == (True, 30, newest.epoch)
    assert f"attempt 2 (preempted): continues from {newest.path}" in err
    out, _ = start().communicate(timeout=COMMAND_WITHIN_S)
    assert out.startswith("run toy is complete: step 30, epoch 3\n")
    assert journal.attempts() == 2, "a complete run is not claimed again"


def test_a_pool_that_is_not_used_is_named(start: Start) -> None:
    _, err = start("--set", "where=gpu", "--set", "epochs=1").communicate(timeout=COMMAND_WITHIN_S)
    assert (
        "warning: where = 'gpu' has no effect: holdfast train always trains on this machine; "
        "python -m flows.train uses the work pool"
    ) in err


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--set", "epoch=3", "epochs"),
        ("--observer", """my'own:Prin"ter""", r"""log.observers.0 = 'my\'own:Prin"ter': expected module:Class"""),
    ],
)
def test_wrong_use_is_one_line(start: Start, option: str, value: str, named: str) -> None:
    process = start(option, value)
    out, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: ")
    assert named in err
    assert "Traceback" not in err


def test_code_that_raises_names_its_log_and_show_names_the_end(start: Start, config: Path) -> None:
    (config.parent / "broken.py").write_text("""
import torch, holdfast

def train(run: holdfast.Run) -> None:
    run.keep(weight=torch.zeros(1))
    for step in run.steps(per_epoch=2):
        raise OSError("the cable is out")
""")
    config.write_text('recipe = "broken.py:train"\nrun = "toy"\nepochs = 2\n')
    _, err = start().communicate(timeout=COMMAND_WITHIN_S)
    assert "OSError: the cable is out" in err
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "show", "toy"], cwd=config.parent, text=True, capture_output=True
    ).stdout
    assert re.search(r"^last ended +at step 0: .*broken.py:7: OSError: the cable is out", shown, re.M), shown
    (config.parent / "broken.py").write_text("1 / 0\n")
    _, err = start().communicate(timeout=COMMAND_WITHIN_S)
    log = config.parent / "logs" / "toy" / "attempt-00000002.log"
    assert f"hint: the traceback is in {log.relative_to(config.parent)}\n" in err
    assert "ZeroDivisionError" in log.read_text()
