"""Tests of the flow that prunes every run of a store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support.makers import make_line, train

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name in ("a", "b", "begun"):
        line = make_line(open_store(str(tmp_path)), name)
        for _ in range(0 if name == "begun" else 5):
            train(line)
    (tmp_path / "no run").mkdir()
    (tmp_path / "no run either.tar").write_text("")
    return tmp_path


def run_prune(store: Path, prefect_api: dict[str, str], *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "flows.prune", str(store), *options],
        cwd=ROOT, env=os.environ | prefect_api, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip


def checkpoints(store: Path, run: str) -> list[str]:
    return sorted(path.name for path in (store / run).glob("epoch-*"))


def test_every_run_is_pruned_by_its_own_policy(store: Path, prefect_api: dict[str, str]) -> None:
    done = run_prune(store, prefect_api, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "run a: keeps 3 checkpoints, would delete 2 of" in done.stderr
    assert len(checkpoints(store, "a")) == 5
    done = run_prune(store, prefect_api)
    assert done.returncode == 0, done.stderr
    assert checkpoints(store, "a") == checkpoints(store, "b") == ["epoch-0003", "epoch-0004", "epoch-0005"]


def test_a_failed_prune_of_one_run_does_not_stop_the_others(store: Path, prefect_api: dict[str, str]) -> None:
    Journal(open_store(str(store)), "a").store.replace("config.snapshot.json", b"{")
    done = run_prune(store, prefect_api)
    assert done.returncode == 3
    assert "run a was not pruned" in done.stderr
    assert "error: 1 of 2 runs were not pruned: a" in done.stderr
    assert "Traceback" not in done.stderr
    assert (len(checkpoints(store, "a")), len(checkpoints(store, "b"))) == (5, 3)


def test_a_store_without_runs_is_reported(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    done = run_prune(tmp_path, prefect_api)
    assert done.returncode == 0, done.stderr
    assert f"warning: there are no runs in {tmp_path}" in done.stderr
