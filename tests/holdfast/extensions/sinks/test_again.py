"""A sink whose process was killed at the worst moment: what it had written is not written again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.curves import Curves, make_curve, read_mlflow, read_trackio, read_wandb

pytestmark = pytest.mark.slow

ROWS = 2000  # W&B writes a part of so many rows to its file before it is told to finish


def write(name: str, folder: Path, last_step: int, *, forgets: bool, dies: bool) -> int:
    """Write the steps up to one to a sink, in a process of its own; return its exit code.

    Args:
        forgets: the sink takes itself for empty, as after a write whose answer was lost.
        dies: the process is killed before the sink is closed.
    """
    code = (
        "from pathlib import Path; from tests.support.curves import write_here; "
        f"write_here({name!r}, Path({str(folder)!r}), {last_step}, {forgets}, {dies})"
    )
    variables = os.environ | {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline"}
    return subprocess.run([sys.executable, "-c", code], env=variables, cwd=ROOT).returncode


def assert_shows(curves: Curves, last_step: int) -> None:
    """Assert that a sink shows each step up to one once; NaN differs from itself, so texts are compared."""
    assert repr(curves) == repr({"train/loss": make_curve(last_step)})


@pytest.mark.extras("trackio")
def test_rows_of_trackio_that_are_sent_again_are_drawn_once(tmp_path: Path) -> None:
    assert write("tests.support.page_sinks:Trackio", tmp_path, 20, forgets=False, dies=True) == -signal.SIGKILL
    assert write("tests.support.page_sinks:Trackio", tmp_path, 30, forgets=True, dies=False) == 0
    assert_shows(read_trackio(tmp_path), 30)


@pytest.mark.extras
def test_metrics_of_mlflow_that_are_sent_again_are_drawn_once(
    tmp_path: Path, mlflow_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mlflow_url:
        pytest.skip("MLflow is installed by make test-extras, where pip can")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    assert write("tests.support.page_sinks:MLflow", tmp_path, 20, forgets=False, dies=True) == -signal.SIGKILL
    assert write("tests.support.page_sinks:MLflow", tmp_path, 30, forgets=True, dies=False) == 0
    assert_shows(read_mlflow(mlflow_url, "the-id"), 30)


@pytest.mark.extras("wandb")
def test_a_torn_file_of_wandb_is_continued_where_it_ends(tmp_path: Path) -> None:
    assert write("wandb", tmp_path, ROWS, forgets=False, dies=True) == -signal.SIGKILL
    written = read_wandb(tmp_path)["train/loss"]
    assert written
    assert repr(written) == repr(make_curve(len(written)))
    assert write("wandb", tmp_path, ROWS, forgets=False, dies=False) == 0
    assert_shows(read_wandb(tmp_path), ROWS)
