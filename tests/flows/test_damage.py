"""A damaged checkpoint is never trained on, never silently passed over, and costs no more than its chunk."""

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
def test_the_run_continues_from_the_one_before(engine: Engine, reference: Reference, damage: str) -> None:
    continue_after(damage, engine, engine, reference)


def test_a_flow_continues_from_the_one_before(engine: Engine, driver: Driver, reference: Reference) -> None:
    continue_after("one byte flipped", engine, driver, reference)


def continue_after(damage: str, engine: Engine, driver: Driver, reference: Reference) -> None:
    """The engine has trained it, and the driver goes on."""
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
def test_latest_is_only_a_hint(engine: Engine, reference: Reference, content: bytes | None) -> None:
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


def test_nothing_left_is_never_a_fresh_start(engine: Engine, driver: Driver) -> None:
    engine.finish(EXTENDED)
    for payload in engine.run_folder.glob("epoch-*/checkpoint.safetensors"):
        flip(payload)
    for each in (driver, engine):
        done = each.run()
        assert done.returncode == 2
        assert "error: run 'toy' has committed, but no checkpoint of it can be verified" in done.stderr
        assert "hint:" in done.stderr
        assert "Traceback" not in done.stderr
    shutil.rmtree(engine.run_folder / "commits")
    shutil.rmtree(engine.run_folder / "quarantine")
    assert engine.run().returncode == 2


def previous_path(driver: Driver, number: int) -> str:
    return driver.journal().read_commit(number - 1).path


def assert_same_bytes_but_for_commits(driver: Driver, reference: Reference) -> None:
    """As `assert_same_bytes`; the metrics of the commit that was given up are on the store under its number, too."""
    standing = driver.standing()
    assert standing.checkpoint_sha256 == reference.standing.checkpoint_sha256
    by_step = {line["step"]: line for line in driver.metrics()}
    assert list(by_step.values()) == reference.metrics
