"""A checkpoint is evaluated as training does it, and nothing on the store is changed by it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint, load_config
from holdfast.attempt import Attempt
from holdfast.cli import app, run_app
from holdfast.config import RunConfig
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import ROOT, Driver
from tests.varied import STEPS_PER_EPOCH, pythonic

pytestmark = pytest.mark.slow

KEEP = "retention.keep_last=99"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy of two epochs, in chunks of four steps; and ``pythonic``, which has an anneal, of nine steps."""
    driver = Driver(tmp_path_factory.mktemp("evaluated"), {})
    train(load_config(driver.config, ["epochs=2", KEEP]))
    train(load_config(driver.config, ["recipe=tests.varied:pythonic", "run=pythonic", "epochs=2"]), chunks=3)
    return Path(driver.store)


def train(config: RunConfig, chunks: int = 99) -> None:
    """The run has so many more commits, if it is not complete before."""
    attempt = Attempt(config)
    try:
        attempt.open()
        while chunks and (chunk := attempt.next_chunk()):
            saved = attempt.train_chunk(chunk)
            assert saved
            attempt.commit(saved)
            chunks -= 1
    finally:
        attempt.close()


def evaluate(run: Path, commit: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert run_app(app, ["evaluate", str(run), commit, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded(run: Path, path: str) -> checkpoint.Metadata:
    found = checkpoint.read_metadata(open_store(str(run)), path)
    assert found
    return found


def test_at_the_end_of_an_epoch_it_is_what_training_wrote_down(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(store)
    found = evaluate(store / "toy", "epoch-0001", capsys)
    metadata = recorded(store / "toy", "epoch-0001")
    assert found["metrics"] == found["recorded"] == metadata.metrics
    assert found["metrics"]["weight"] != recorded(store / "toy", "epoch-0002").metrics["weight"]
    assert (found["run"], found["commit"], found["path"]) == ("toy", 3, "epoch-0001")
    assert (found["step"], found["epoch"], found["anneals"]) == (10, 1, {})
    assert found["checkpoint_sha256"] == metadata.checkpoint_sha256
    assert found["probe"] == metadata.probe.model_dump()
    assert files(store) == before


def test_inside_an_epoch_there_is_nothing_to_compare_with(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["evaluate", str(store / "toy"), "4"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    content_id = recorded(store / "toy", "epoch-0002-step-00000014").checkpoint_sha256
    assert first == f"commit 4 of run toy (epoch-0002-step-00000014), step 14: {content_id}"
    assert rows[0].split()[0] == "weight"
    assert "training" not in "".join(rows)


def test_anneals_are_those_of_the_checkpoints_own_step(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not those of the next chunk, nor of a fresh start."""
    found = evaluate(store / "pythonic", "", capsys)
    temperature = pythonic().anneals["temperature"]
    assert found["step"] == STEPS_PER_EPOCH + 4
    assert found["anneals"] == {"temperature": temperature.at(found["step"], STEPS_PER_EPOCH)}
    assert 0.1 < found["anneals"]["temperature"] < temperature.at(found["step"] - 1, STEPS_PER_EPOCH) < 1
    assert (found["metrics"], found["recorded"]) == ({}, {})


def test_damage_is_told_and_not_quarantined(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "toy"
    shutil.copytree(store / "toy", run)
    payload = run / "epoch-0002" / "checkpoint.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    before = files(run)
    assert run_app(app, ["evaluate", str(run)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: checkpoint epoch-0002 (commit 6) is damaged: ")
    assert files(run) == before
    assert Journal(open_store(str(tmp_path)), "toy").quarantine_reasons() == []


def test_as_a_flow(store: Path, prefect_api: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.evaluate", f"{store}/toy"],
        cwd=ROOT, env=os.environ | prefect_api, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    metadata = recorded(store / "toy", "epoch-0002")
    assert f"commit 6 of run toy (epoch-0002), step 20: {metadata.checkpoint_sha256}" in done.stdout
    assert f"weight          {metadata.metrics['weight']:.6g}\n" in done.stdout
    assert "Traceback" not in done.stderr
