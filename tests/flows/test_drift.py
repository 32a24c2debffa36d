"""Tests of drift: a run refuses changed settings, code and machines, unless a person accepts them, on record."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from holdfast import checkpoint
from holdfast.journal import AttemptRecord, FileRecord, record_name
from tests.conftest import Driver, Engine

pytestmark = pytest.mark.slow

RECIPE = """
import os
import torch
from torch.nn import functional as F
from holdfast import Recipe
from tests.support.toy import Made

def own(momentum: float = 0.5) -> Recipe:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), float(os.environ.get("OWN_LR", "0.01")), momentum)
    loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
    return Recipe(model=model, data=Made(), optimizer=optimizer, loss=loss, batch_size=8)
"""
STEPS_PER_EPOCH = 8


def assert_refused(done: "subprocess.CompletedProcess[str]", *said: str) -> None:
    """Assert exit code 1, and that the error and its hint contain these texts."""
    assert done.returncode == 1, done.stderr
    for text in ("error: ", *said, "\nhint: "):
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def assert_goes_on(driver: Driver, done: "subprocess.CompletedProcess[str]", step: int) -> AttemptRecord:
    """Assert that the run went on to this step; return the record of its last attempt."""
    assert done.returncode == 0, done.stderr
    standing = driver.standing()
    assert (standing.complete, standing.step) == (True, step)
    return driver.journal().read_attempt(standing.attempts)


def lrs(driver: Driver, step: int) -> list[float]:
    """Return a step's learning rates, from its metrics."""
    (found,) = [line["lrs"] for line in driver.metrics() if line["step"] == step]
    assert isinstance(found, list)
    return found


def move(driver: Driver) -> None:
    """Move the store to another folder."""
    elsewhere = driver.folder / "elsewhere"
    Path(driver.store).rename(elsewhere)
    driver.config.write_text(driver.config.read_text().replace(driver.store, str(elsewhere)))
    driver.store = str(elsewhere)


def train_on_another_cpu(driver: Driver) -> None:
    """Make the newest checkpoint say that a different CPU trained it."""
    journal = driver.journal()
    commit = journal.newest()
    assert commit
    metadata = checkpoint.read_metadata(journal.store, commit.path)
    assert metadata
    environment = metadata.environment | {"cpu": "Z80", "cpu_vector": "none"}
    data = metadata.model_copy(update={"environment": environment}).to_bytes()
    record = FileRecord(name=checkpoint.METADATA, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    files = [record if file.name == checkpoint.METADATA else file for file in commit.files]
    journal.store.replace(f"{commit.path}/{checkpoint.METADATA}", data)
    journal.store.replace(record_name("commits", commit.number), commit.model_copy(update={"files": files}).to_bytes())


def test_changed_settings_and_machines_need_to_be_accepted(engine: Engine) -> None:
    engine.finish("epochs=1")
    done = engine.run("epochs=2", "settings.lr=0.5")
    accept = "--set 'resume.accept_drift=[\"settings.lr\"]'"
    assert_refused(done, "settings differ", "changed values:\n  settings.lr: saved 0.05, now 0.5\n", accept)
    assert engine.standing().attempts == 1

    # Changes of locations, retention and logging are no drift.
    move(engine)
    operational = [f"log.folder={engine.folder}/other-logs", "log.every=3", "retention.keep_last=1"]
    done = engine.run("epochs=2", "settings.lr=0.5", 'resume.accept_drift=["lr"]', *operational)
    lineage = assert_goes_on(engine, done, 20).lineage
    assert "warning: drift: settings.lr: saved 0.05, now 0.5; this change is allowed, and recorded" in done.stderr
    epochs, lr = lineage["drift"].pop("epochs"), lineage["drift"].pop("settings.lr")
    assert lr == {"kind": "value", "saved": 0.05, "now": 0.5, "was": "", "default": False}
    assert (epochs["saved"], epochs["now"]) == (1, 2)
    # The accepted setting changes the built optimizer, which needs no acceptance of its own.
    assert {change["kind"] for change in lineage["drift"].values()} == {"built"}
    base_lrs = [lineage["drift"][f"built.optimizer.{number}.initial_lr"]["now"] for number in (0, 1)]
    assert base_lrs == [0.5, 0.25]
    assert lineage["environment"]["promise"] == "identical"
    assert (engine.folder / "other-logs").exists()
    # The schedule continues at its position with ten times the rate, and the groups keep their ratio.
    assert lrs(engine, 11)[0] == pytest.approx(10 * lrs(engine, 10)[0], rel=0.05)
    assert [lrs(engine, step)[0] / lrs(engine, step)[1] for step in (10, 11, 20)] == pytest.approx([2, 2, 2])

    # The new value is the run's own now: it needs no acceptance, and the old value would.
    train_on_another_cpu(engine)
    done = engine.run("epochs=3", "settings.lr=0.5", "resume.environment=refuse")
    assert_refused(
        done, "this machine may compute different bits", "cpu: saved 'Z80'", "--set resume.environment=record"
    )
    assert engine.standing().attempts == 2
    done = engine.run("epochs=3", "settings.lr=0.5")
    lineage = assert_goes_on(engine, done, 30).lineage
    assert "warning: this machine may compute different bits than the run's earlier machine" in done.stderr
    assert lineage["drift"].keys() == {"epochs"}
    assert lineage["environment"]["promise"] == "not promised"
    assert [reason.split(":")[0] for reason in lineage["environment"]["reasons"]] == ["cpu", "cpu_vector"]


def test_an_accepted_change_that_the_checkpoint_does_not_fit_is_wrong_use(engine: Engine) -> None:
    engine.finish("epochs=1")
    before = engine.standing()
    done = engine.run("epochs=2", "settings.width=32", 'resume.accept_drift=["width"]')
    assert done.returncode == 1, done.stderr
    assert (
        "error: epoch-0001 can't be resumed with the accepted changes of settings.width: the saved model doesn't"
        in done.stderr
    )
    assert "size mismatch for 0.weight" in done.stderr
    assert "\n  settings.width: saved 16, now 32\n" in done.stderr
    assert "hint: put the saved values back, or train as a run of another name (--set run=...)" in done.stderr
    assert "code has changed" not in done.stderr
    assert engine.standing().commit == before.commit
    assert engine.finish("epochs=2").step == 20


def test_changed_code_is_named_with_its_functions(engine: Engine) -> None:
    source = engine.folder / "drifting.py"
    engine.environment = engine.environment | {"PYTHONPATH": str(engine.folder)}
    helped = RECIPE.replace("F.mse_loss(", "scaled(").replace(
        "def own", "scaled = lambda a, b: F.mse_loss(a, b)\n\ndef own"
    )
    source.write_text(helped)
    assert_goes_on(engine, engine.run("recipe=drifting:own"), 3 * STEPS_PER_EPOCH)
    source.write_text(helped.replace("F.mse_loss(a, b)", "F.mse_loss(a, b) * 2"))
    done = engine.run("recipe=drifting:own", "epochs=4")
    assert_refused(done, "  sources.drifting: its code has changed\n  functions with different code: scaled\n")


def test_changed_code_and_changed_optimizers_need_to_be_accepted(engine: Engine) -> None:
    source = engine.folder / "drifting.py"
    engine.environment = engine.environment | {"PYTHONPATH": str(engine.folder)}
    own = "recipe=drifting:own"
    source.write_text(RECIPE)
    assert_goes_on(engine, engine.run(own), 3 * STEPS_PER_EPOCH)

    # Comments and dates are no code. A changed environment variable shows in the built optimizer.
    source.write_text(f"# A comment.\n\n{RECIPE}")
    os.utime(source, (0, 0))
    done = engine.run(own, "epochs=4", OWN_LR="0.5")
    named = "built.optimizer.0.lr: saved 0.01, now 0.5"
    assert_refused(done, "the recipe builds ", named, 'accept_drift=["built.optimizer.0.lr"]')
    assert engine.standing().attempts == 1

    # A new setting with its default is an upgrade, but the changed code needs to be accepted.
    source.write_text(RECIPE.replace("momentum: float = 0.5", "momentum: float = 0.5, bias: bool = True"))
    done = engine.run(own, "epochs=4")
    assert_refused(done, "changed code:\n  sources.drifting: its code has changed\n", "put the saved code back")
    assert "bias" not in done.stderr
    done = engine.run(own, "epochs=4", 'resume.accept_drift=["sources"]')
    drift = assert_goes_on(engine, done, 4 * STEPS_PER_EPOCH).lineage["drift"]
    assert (drift["settings.bias"]["kind"], drift["sources.drifting"]["kind"]) == ("added", "source")
    assert drift.keys() <= {"epochs", "settings.bias", "sources.drifting"}
    assert (drift["settings.bias"]["now"], drift["settings.bias"]["default"]) == (True, True)
