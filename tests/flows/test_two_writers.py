"""Tests of two live writers of one run: exactly one line of commits advances."""

import json
import shutil
import time
from pathlib import Path

import pytest

from holdfast import load_config
from holdfast.attempt import Attempt, Line
from holdfast.checkpoint import Saved
from holdfast.errors import Superseded
from tests.conftest import COMMAND_WITHIN_S, Driver, Reference, assert_same_bytes
from tests.support.makers import claim

pytestmark = pytest.mark.slow


def test_started_twice_at_once_one_trains(driver: Driver, reference: Reference, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    both = [driver.start(TOY_HELD=str(held)) for _ in range(2)]
    # Until both are in their first step, or one has lost the race for the first attempt. An attempt that still opens
    # could find the run trained by the other one, and so have nothing to commit.
    while len([*tmp_path.glob("held.*.waits")]) < 2 and all(process.poll() is None for process in both):
        time.sleep(0.1)
    held.unlink()
    ends = sorted((*process.communicate(timeout=COMMAND_WITHIN_S), process.returncode) for process in both)
    assert sorted(code for _, _, code in ends) == [0, 3], ends
    (error,) = [err for _, err, code in ends if code == 3]
    assert "is superseded by attempt" in error or "another process has just started attempt" in error, error
    assert_same_bytes(driver, reference)


@pytest.mark.usefixtures("forked_ranks")
def test_a_commit_that_slipped_through_the_fence_is_followed(driver: Driver, reference: Reference) -> None:
    attempt = Attempt(load_config(driver.config), 2)
    try:
        attempt.open()
        chunk = attempt.next_chunk()
        assert chunk
        saved = attempt.train_chunk(chunk)
        assert saved
        slip_through(driver, attempt, saved)
        assert attempt.commit(saved).attempt == 1
        while (chunk := attempt.next_chunk()) is not None:
            saved = attempt.train_chunk(chunk)
            if saved is not None:  # None: the killed ranks had saved the whole chunk, which was then adopted
                attempt.commit(saved)
        claim(driver.journal(), 3)
        with pytest.raises(Superseded):
            attempt.upkeep.prune_epochs()
    finally:
        attempt.close()
    assert_same_bytes(driver, reference)
    assert all(commit.parent == commit.number - 1 for commit in driver.journal().candidates())


def slip_through(driver: Driver, attempt: Attempt, saved: Saved) -> None:
    """Publish a commit as attempt 1 would, if it had checked the fence just before attempt 2 began."""
    path = saved.path
    shutil.copytree(driver.run_folder / path, driver.run_folder / f"{path}.2")
    other = Line(driver.journal(), 1, attempt.fingerprint, attempt.steps_per_epoch)
    other.journal.check_fence = lambda number: None  # type: ignore[method-assign]
    other.commit(saved.model_copy(update={"path": f"{path}.2"}), "chunk")
    assert json.loads((driver.run_folder / "latest.json").read_text())["attempt"] == 1
