"""Ranks wait for a slow store, and for each other, as long as it takes; and send no object to another rank's device."""

import json
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.support.lives import Lives

pytestmark = pytest.mark.slow

TIMEOUT_S, HELD_S = 1.0, 2.0
RANKS, MEGABYTES = 4, 24  # `python -m pytest -s` prints the memory


def settings(folder: Path) -> dict[str, object]:
    """Return the settings of a run in this folder whose two ranks have extras of their own."""
    return {
        "recipe": "tests.support.varied:normalised", "run": "r", "store": str(folder), "epochs": 1,
        "chunk": {"steps": 3}, "compute": {"ranks": 2, "device": "cpu"}, "log": {"folder": str(folder / "logs")},
    }  # fmt: skip


def list_contents(nursery: Lives, folder: Path, timeout_s: float, held_s: float) -> dict[int, str]:
    """Train a run; return the content id of each commit, by step."""
    marks = folder / "marks"
    marks.mkdir(parents=True)
    config = folder / "config.toml"
    lines = [
        f"{name}.{inner} = {json.dumps(each)}" if inner else f"{name} = {json.dumps(each)}"
        for name, value in settings(folder).items()
        for inner, each in (value if isinstance(value, dict) else {"": value}).items()
    ]
    config.write_text("\n".join(lines))
    done = nursery.call("tests.support.waits:train", str(config), timeout_s, held_s, str(marks))
    assert done.returncode == 0, done.stdout + done.stderr
    commits = [*Journal(open_store(str(folder)), "r").candidates()]
    assert len([*marks.iterdir()]) == len(commits) == 2
    assert "the ranks ended" not in done.stdout + done.stderr
    return {commit.step: commit.checkpoint_sha256 for commit in commits}


def test_a_store_that_answers_after_torchs_timeout_ends_no_run(nursery: Lives, tmp_path: Path) -> None:
    """One rank waits for the store while the other waits for that rank: in a step, and for the next order."""
    slow = list_contents(nursery, tmp_path / "slow", TIMEOUT_S, HELD_S)
    assert slow == list_contents(nursery, tmp_path / "fast", 1800.0, 0.0)


@pytest.mark.parametrize("check", ["find_timeouts", "gather_from_a_device", "capture_extras"])
def test_ranks_exchange_objects_in_the_hosts_memory(nursery: Lives, tmp_path: Path, check: str) -> None:
    done = nursery.call("tests.support.waits:in_ranks", 2, check, settings(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def test_the_ranks_of_a_node_read_a_checkpoint_into_its_memory_once(nursery: Lives, tmp_path: Path) -> None:
    config = settings(tmp_path) | {"recipe": "tests.support.waits:wide", "settings": {"megabytes": MEGABYTES}}
    config["compute"] = {"ranks": RANKS, "device": "cpu"}
    done = nursery.call("tests.support.waits:in_ranks", RANKS, "measure_restore", config, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    print(done.stderr)
