"""Tests of the main job as a person runs it: the language model, without a configured Prefect server."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import COMMAND_WITHIN_S, IN_SOAK, ROOT, MakeHome, await_ended, kill_tree
from tests.support.lives import ranks_of
from tests.support.processes import command_of

pytestmark = pytest.mark.slow

# The job takes half a minute on an idle machine, but other tests may run beside it.
TRAINED_WITHIN_S = 2400

CONFIG = ROOT / "holdfast" / "recipes" / "language.toml"


def start(folder: Path, *settings: str) -> "subprocess.Popen[str]":
    """Start the command of ``make train`` in a new user's environment, with all its files in one folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"HOME": str(folder), "PREFECT_HOME": str(folder / "prefect"), "DO_NOT_TRACK": "1"}
    where = [f"store={folder}/runs", f"log.folder={folder}/logs", *settings]
    return subprocess.Popen(
        [sys.executable, "-m", "flows.train", str(CONFIG), *[part for item in where for part in ("--set", item)]],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> str:
    try:
        out, err = process.communicate(timeout=TRAINED_WITHIN_S)
    finally:
        kill_tree(process.pid)
    assert process.returncode == 0, err
    return out


@pytest.mark.timeout(2 * TRAINED_WITHIN_S)
def test_the_main_job_learns_and_prints_where_the_run_lies(tmp_path: Path) -> None:
    """Train one of four epochs, with one of four layers and half the context, in a fifteenth of the time.

    Use one thread: two would wait for each other in a busy loop while other tests use the cores.
    """
    shorter = ("epochs=1", "settings.layers=1", "settings.context=64", "determinism.threads=1")
    out = finish(start(tmp_path, *shorter))
    assert "run language is complete: step 120, epoch 1" in out
    assert 0 < number("final loss", out) < 4
    assert number("bits per byte", out) < 3.5
    stored_in = re.search(r"stored in +(\S.*)", out)
    assert stored_in
    payload = Path(stored_in[1]) / "checkpoint.safetensors"
    content_id = subprocess.run(["sha256sum", payload], capture_output=True, text=True, check=True).stdout.split()[0]
    assert f"checkpoint      {content_id}" in out
    assert finish(start(tmp_path, *shorter)) == out  # the second command trained nothing: there is still one attempt
    command = [sys.executable, "-m", "holdfast.cli", "show", f"{tmp_path}/runs/language", "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    known = {name: shown[name] for name in ("run", "complete", "step", "epoch", "commit", "attempts")}
    assert known == {"run": "language", "complete": True, "step": 120, "epoch": 1, "commit": 2, "attempts": 1}
    assert shown["checkpoint_sha256"] == content_id
    assert re.fullmatch("[0-9a-f]{64}", shown["config_fingerprint"])


@pytest.mark.parametrize(
    ("moment", "deadly"), [pytest.param("starting", signal.SIGKILL, marks=IN_SOAK), ("training", signal.SIGTERM)]
)
def test_no_process_is_left_behind(tmp_path: Path, make_home: MakeHome, moment: str, deadly: signal.Signals) -> None:
    """The command's death must end the ranks and its temporary server. Prefect's own server would survive for ever."""
    make_home(tmp_path / "prefect")
    process = start(tmp_path, "settings.width=8", "settings.heads=1", "settings.layers=1")
    claimed = tmp_path / "runs" / "language" / "attempts"
    try:
        while not (claimed.exists() if moment == "training" else ranks_of(process.pid)):
            assert process.poll() is None
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        if moment == "training":
            (server,) = (child for child in started if "tasks.server" in command_of(child))
            (rank,) = ranks_of(process.pid)
            assert rank.create_time() <= server.create_time()  # the rank did not wait for the server
        process.send_signal(deadly)
        _, err = process.communicate(timeout=COMMAND_WITHIN_S)
    finally:
        kill_tree(process.pid)
        process.communicate()
    assert "Fatal Python error" not in err
    await_ended(started)


def number(name: str, out: str) -> float:
    found = re.search(rf"{name} +([0-9.]+)", out)
    assert found, out
    return float(found[1])
