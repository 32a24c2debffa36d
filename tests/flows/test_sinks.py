"""A metric sink of a run that Prefect trains."""

import pytest

from tests.conftest import Driver, Reference, assert_same_bytes
from tests.support.curves import read_tensorboard


@pytest.mark.extras("tensorboard")
@pytest.mark.slow
def test_the_attempts_of_a_flow_feed_the_sinks(driver: Driver, reference: Reference) -> None:
    driver.finish('log.sinks=["tensorboard"]', "epochs=2")
    driver.finish('log.sinks=["tensorboard"]')
    assert_same_bytes(driver, reference)
    curves = read_tensorboard(driver.folder / "logs")
    assert curves["train/loss"] == [(line["step"], pytest.approx(line["loss"])) for line in reference.metrics]
