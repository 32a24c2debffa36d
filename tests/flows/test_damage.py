"""Tests of damage: no run trains on a damaged checkpoint, hides it, or loses more than its chunk."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import app, run_app
from tests.conftest import Driver, Engine, Reference, assert_same_bytes

pytestmark = pytest.mark.slow

EXTENDED = "epochs=2"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "one byte flipped": lambda folder: flip(folder / "checkpoint.safetensors"),
    "truncated": lambda folder: (folder / "checkpoint.safetensors").write_bytes(
        (folder / "checkpoint.safetensors").read_bytes()[:-1]
    ),
    "emptied": lambda folder: (folder / "checkpoint.safetensors").write_bytes(b""),
    "payload removed": lambda folder: (folder / "checkpoint.safetensors").unlink(),
    "metadata removed": lambda folder: (folder / "metadata.json").unlink(),
    "folder removed": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    engine: Engine, reference: Reference, damage: str
) -> None:
    continue_after(damage, engine, engine, reference)


def test_a_flow_continues_from_the_checkpoint_before_a_damaged_one(
    engine: Engine, driver: Driver, reference: Reference
) -> None:
    continue_after("one byte flipped", engine, driver, reference)


def continue_after(damage: str, engine: Engine, driver: Driver, reference: Reference) -> None:
    """Damage the newest checkpoint of a run that the engine trained; continue the run with the driver."""
    engine.finish(EXTENDED)
    newest = driver.journal().newest()
    assert newest is not None
    DAMAGE[damage](driver.run_folder / newest.path)
    assert run_app(app, ["verify", str(driver.run_folder)]) == 2
    done = driver.run()
    assert done.returncode == 0, done.stderr
    assert f"warning: commit {newest.number} of run 'toy' is quarantined" in done.stderr
    assert f"continues from {previous_path(driver, newest.number)}" in done.stderr
    assert driver.journal().is_quarantined(newest.number)
    assert_same_bytes_but_for_commits(driver, reference)
    assert run_app(app, ["verify", str(driver.run_folder)]) == 0


def test_damage_of_a_complete_run_is_found_and_mended(engine: Engine, driver: Driver, reference: Reference) -> None:
    flip(engine.run_folder / engine.finish().path / "checkpoint.safetensors")
    driver.finish()
    assert_same_bytes_but_for_commits(driver, reference)


@pytest.mark.parametrize("content", [None, b'{"commit": 99}'])
def test_a_damaged_latest_is_only_a_hint(engine: Engine, reference: Reference, content: bytes | None) -> None:
    engine.finish(EXTENDED)
    latest = engine.run_folder / "latest.json"
    latest.unlink() if content is None else latest.write_bytes(content)
    engine.finish()
    assert json.loads(latest.read_text())["commit"] == 9
    assert_same_bytes(engine, reference)


def test_damaged_commit_record_is_quarantined(engine: Engine, reference: Reference) -> None:
    engine.finish(EXTENDED)
    (engine.run_folder / "commits" / "00000006.json").write_bytes(b"{")
    assert run_app(app, ["verify", str(engine.run_folder)]) == 2
    done = engine.run()
    assert "commit 6 of run 'toy' is quarantined" in done.stderr
    assert_same_bytes_but_for_commits(engine, reference)


def test_a_run_without_a_verified_checkpoint_never_starts_afresh(engine: Engine, driver: Driver) -> None:
    engine.finish(EXTENDED)
    for payload in engine.run_folder.glob("epoch-*/checkpoint.safetensors"):
        flip(payload)
    for each in (driver, engine):
        done = each.run()
        assert done.returncode == 2
        assert "error: run 'toy' has commits, but none of its checkpoints can be verified" in done.stderr
        assert "hint:" in done.stderr
        assert "Traceback" not in done.stderr
    shutil.rmtree(engine.run_folder / "commits")
    shutil.rmtree(engine.run_folder / "quarantine")
    assert engine.run().returncode == 2


def previous_path(driver: Driver, number: int) -> str:
    return driver.journal().read_commit(number - 1).path


def assert_same_bytes_but_for_commits(driver: Driver, reference: Reference) -> None:
    """Assert the same bytes and metrics. The store also has the metrics of the quarantined commit, under its number."""
    standing = driver.standing()
    assert standing.checkpoint_sha256 == reference.standing.checkpoint_sha256
    by_step = {line["step"]: line for line in driver.metrics()}
    assert list(by_step.values()) == reference.metrics
