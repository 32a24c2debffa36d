"""Tests of evaluation: it gives the metrics that training gave, and changes nothing on the store."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.journal import Journal
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import ROOT, Engine, RunFlow
from tests.support.lives import Lives
from tests.support.varied import STEPS_PER_EPOCH, pythonic

pytestmark = pytest.mark.slow

KEEP = "retention.keep_last=99"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Path:
    """Return a store with two runs: ``toy`` (two epochs, chunks of 4 steps) and ``pythonic`` (9 steps, an anneal)."""
    engine = Engine(tmp_path_factory.mktemp("evaluated"), {}, nursery=nursery)
    engine.finish("epochs=2", KEEP)
    pythonic = ["recipe=tests.support.varied:pythonic", "run=pythonic", "epochs=2"]
    struck = engine.folder / "struck"
    engine.run(*pythonic, KEEP, **fault("latest-replaced", 3, "both", struck))
    assert struck.exists()
    return Path(engine.store)


def evaluate(engine: Engine, run: Path, commit: str) -> Any:
    done = engine.command("evaluate", str(run), commit, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded(run: Path, path: str) -> checkpoint.Metadata:
    found = checkpoint.read_metadata(open_store(str(run)), path)
    assert found
    return found


def test_an_evaluation_at_an_epochs_end_equals_that_of_training(engine: Engine, store: Path) -> None:
    before = files(store)
    found = evaluate(engine, store / "toy", "epoch-0001")
    metadata = recorded(store / "toy", "epoch-0001")
    assert found["metrics"] == found["recorded"] == metadata.metrics
    assert found["metrics"]["weight"] != recorded(store / "toy", "epoch-0002").metrics["weight"]
    assert (found["run"], found["commit"], found["path"]) == ("toy", 3, "epoch-0001")
    assert (found["step"], found["epoch"], found["anneals"]) == (10, 1, {})
    assert found["checkpoint_sha256"] == metadata.checkpoint_sha256
    assert found["probe"] == metadata.probe.model_dump()
    assert files(store) == before


def test_an_evaluation_inside_an_epoch_compares_nothing(engine: Engine, store: Path) -> None:
    done = engine.command("evaluate", str(store / "toy"), "4")
    assert done.returncode == 0
    first, *rows = done.stdout.splitlines()
    content_id = recorded(store / "toy", "epoch-0002-step-00000014").checkpoint_sha256
    assert first == f"commit 4 of run toy (epoch-0002-step-00000014), step 14: {content_id}"
    assert rows[0].split()[0] == "weight"
    assert "training" not in "".join(rows)


def test_anneals_are_those_of_the_checkpoints_own_step(engine: Engine, store: Path) -> None:
    """The anneals must be neither those of the next chunk nor those of step 0."""
    found = evaluate(engine, store / "pythonic", "")
    temperature = pythonic().anneals["temperature"]
    assert found["step"] == STEPS_PER_EPOCH + 4
    assert found["anneals"] == {"temperature": temperature.at(found["step"], STEPS_PER_EPOCH)}
    assert 0.1 < found["anneals"]["temperature"] < temperature.at(found["step"] - 1, STEPS_PER_EPOCH) < 1
    assert (found["metrics"], found["recorded"]) == ({}, {})


def test_an_evaluation_reports_damage_and_quarantines_nothing(engine: Engine, store: Path, tmp_path: Path) -> None:
    run = tmp_path / "toy"
    shutil.copytree(store / "toy", run)
    payload = run / "epoch-0002" / "checkpoint.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    before = files(run)
    done = engine.command("evaluate", str(run))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: checkpoint epoch-0002 (commit 6) is damaged: ")
    assert files(run) == before
    assert Journal(open_store(str(tmp_path)), "toy").quarantine_reasons() == []


def test_a_flow_that_trains_nothing_logs_what_it_has_found() -> None:
    """Prefect's client sends the server only what the logger's level lets through."""
    program = "import flows.evaluate, logging; print(logging.getLogger('holdfast').isEnabledFor(logging.INFO))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_evaluate_as_a_flow(store: Path, run_flow: RunFlow) -> None:
    done = run_flow("evaluate", store=str(store), run="toy")
    assert done.returncode == 0, done.stderr
    metadata = recorded(store / "toy", "epoch-0002")
    assert f"commit 6 of run toy (epoch-0002), step 20: {metadata.checkpoint_sha256}" in done.stdout
    assert re.search(rf"^  weight  +{metadata.metrics['weight']:.6g}$", done.stdout, re.MULTILINE)
    assert "Traceback" not in done.stderr
