"""Tests of the flow that prunes every run of a store."""

from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import RunFlow
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


def checkpoints(store: Path, run: str) -> list[str]:
    return sorted(path.name for path in (store / run).glob("epoch-*"))


def test_every_run_is_pruned_by_its_own_policy(store: Path, run_flow: RunFlow) -> None:
    done = run_flow("prune", store=str(store), dry_run=True)
    assert done.returncode == 0, done.stderr
    assert "run a: keeps 3 checkpoints, would delete 2 of" in done.stderr
    assert len(checkpoints(store, "a")) == 5
    done = run_flow("prune", store=str(store))
    assert done.returncode == 0, done.stderr
    assert checkpoints(store, "a") == checkpoints(store, "b") == ["epoch-0003", "epoch-0004", "epoch-0005"]


def test_a_failed_prune_of_one_run_does_not_stop_the_others(store: Path, run_flow: RunFlow) -> None:
    Journal(open_store(str(store)), "a").store.replace("config.snapshot.json", b"{")
    done = run_flow("prune", store=str(store))
    assert done.returncode == 3
    assert "run a was not pruned" in done.stderr
    assert "error: 1 of 2 runs were not pruned: a" in done.stderr
    assert "Traceback" not in done.stderr
    assert (len(checkpoints(store, "a")), len(checkpoints(store, "b"))) == (5, 3)


def test_a_store_without_runs_is_reported(tmp_path: Path, run_flow: RunFlow) -> None:
    done = run_flow("prune", store=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"warning: there are no runs in {tmp_path}" in done.stderr
