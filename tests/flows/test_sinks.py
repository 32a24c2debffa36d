"""A metric sink of a run that Prefect trains."""

from pathlib import Path

import pytest

from holdfast.testing.faults import fault
from tests.conftest import Driver, Reference, assert_same_bytes
from tests.support.curves import read_tensorboard

pytestmark = [pytest.mark.extras("tensorboard"), pytest.mark.slow]


def test_the_attempts_of_a_flow_feed_the_sinks(driver: Driver, reference: Reference) -> None:
    driver.finish(*drawn_in(driver.folder / "one"), "epochs=2")
    driver.finish(*drawn_in(driver.folder / "one"))
    assert_same_bytes(driver, reference)
    assert_drawn(driver.folder / "one", reference)


def test_a_run_whose_machine_is_lost_at_its_last_commit_is_drawn_to_its_end(
    driver: Driver, reference: Reference
) -> None:
    """The sink of the lost machine has drawn nothing of it, as its process is lost, too."""
    driver.run(**fault("commit-recorded", reference.commits, "both", driver.folder / "struck"))
    assert driver.journal().newest_number() == reference.commits
    driver.finish(*drawn_in(driver.folder / "other"))
    assert_drawn(driver.folder / "other", reference)
    driver.finish(*drawn_in(driver.folder / "third"))  # it finds a complete run
    assert_drawn(driver.folder / "third", reference)


def drawn_in(folder: Path) -> list[str]:
    """Return the settings that let a sink write into a folder."""
    return ['log.sinks=["tensorboard"]', f'log.folder="{folder}"']


def assert_drawn(folder: Path, reference: Reference) -> None:
    curves = read_tensorboard(folder)
    assert curves["train/loss"] == [(line["step"], pytest.approx(line["loss"])) for line in reference.metrics]
