"""Tests of wrong use: one clear line, a hint, a documented exit code, and no loss."""

import os
import subprocess

import pytest

from holdfast.data import Order
from tests.conftest import Driver, Engine, Reference, assert_same_bytes
from tests.support.disks import small_disk
from tests.support.toy import SAMPLES

pytestmark = pytest.mark.slow


def assert_refused(done: "subprocess.CompletedProcess[str]", exit_code: int, error: str, hint: str) -> None:
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert len(lines) == 2, done.stderr
    assert error in lines[0]
    assert hint in lines[1]


@pytest.mark.parametrize(
    ("setting", "error", "hint"),
    [
        ("epcohs=4", "unknown key epcohs", "did you mean epochs?"),
        ("chunk.step=4", "unknown key chunk.step", "did you mean chunk.steps?"),
        ("settings.widht=4", "unknown key settings.widht", "did you mean width?"),
        ("settings.width=wide", "settings.width = 'wide'", ""),
        ("recipe=tests.tyo:toy", "there is no module tests.tyo", "PYTHONPATH"),
        ("recipe=tests.support.toy:tyo", "tests.support.toy has no tyo", "did you mean toy?"),
        ("recipe=toy", "recipe = 'toy'", ""),
        ("epochs=0", "epochs = 0", ""),
        ("store=http://host/runs", "http:// isn't known to create a file only if its name is free", "s3://"),
        ("store=memory://runs", "can't share a store in memory", ""),
        ("store=/dev/null/runs", "in /dev/null/runs/toy: Not a directory", "store that you may write to"),
        ("settings.schedule=linaer", "expected one of linear, step", ""),
        ("compute.device=cuda", "torch sees no GPU", "cpu"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(engine: Engine, setting: str, error: str, hint: str) -> None:
    done = engine.run(setting)
    if hint:
        assert_refused(done, 3 if "dev/null" in setting else 1, error, hint)
    else:
        assert done.returncode == 1
        assert f"error: {error}" in done.stderr or error in done.stderr
        assert "Traceback" not in done.stderr


def test_a_wrong_setting_of_a_flow_is_one_clear_error(driver: Driver) -> None:
    """Some settings are refused before anything starts, others only by a rank."""
    assert_refused(driver.run("epcohs=4"), 1, "unknown key epcohs", "did you mean epochs?")
    assert_refused(driver.run("recipe=tests.support.toy:tyo"), 1, "tests.support.toy has no tyo", "did you mean toy?")


def test_a_wrong_configuration_is_one_clear_error(driver: Driver) -> None:
    driver.config.write_text("epochs = = 3")
    assert_refused(driver.run(), 1, "is not TOML", "toml.io")
    driver.config.rename(driver.config.with_name("tyo.toml"))
    assert_refused(driver.run(), 1, "there is no configuration", "tyo.toml")


def test_drift_is_refused_field_by_field(engine: Engine, driver: Driver, reference: Reference) -> None:
    engine.finish("epochs=2")
    done = driver.run("settings.lr=0.5")
    assert_refused(done, 1, "settings differ", "put the saved values back")
    assert "settings.lr: saved 0.05, now 0.5" in done.stderr
    assert driver.standing().attempts == 1
    # None of these settings changes a computed number.
    engine.finish(f"log.folder={driver.folder}/elsewhere", "retention.keep_last=2", "chunk.steps=5")
    assert_same_bytes(driver, reference)


def test_failing_recipe_stops_without_looping(driver: Driver) -> None:
    poison = Order(SAMPLES, 4, 2, 1234).step_indices(5)[0, 0]
    done = driver.run(f"settings.poison={poison}")
    assert done.returncode == 3
    assert "error: training failed in step 5: " in done.stderr
    assert "ZeroDivisionError: as it was told to" in done.stderr
    assert "Traceback" not in done.stderr
    assert "hint: fix the code, then start the run again" in done.stderr
    assert "new ranks" not in done.stderr  # they would train the chunk again, only to raise the same
    assert driver.standing().step == 4


def test_a_recipe_without_enough_memory_is_one_clear_error(engine: Engine) -> None:
    done = engine.run("recipe=tests.support.greedy:greedy")
    assert_refused(done, 3, "out of memory in step", "a smaller batch_size")
    assert {ending.reason for ending in engine.journal().endings()} == {"out_of_memory"}


def test_a_full_disk_is_one_clear_error(driver: Driver, engine: Engine, reference: Reference) -> None:
    with small_disk(driver.folder / "runs", size_kb=400) as disk:
        filler = disk / "filler"
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        filler.write_bytes(b"x" * (free - 150_000))
        assert_refused(driver.run(), 3, "no space left", "make room")
        assert 0 < driver.standing().step < 30
        filler.unlink()
        engine.finish()
        assert_same_bytes(driver, reference)
