"""Loops that keep their state in forms in which people have it: a cut at every step changes no byte."""

from pathlib import Path

import pytest

from holdfast.config import Determinism, RunConfig
from tests.support.odd_loops import ODD_LOOPS, PER_EPOCH
from tests.support.trainings import content_id, live

TOTAL = 3 * PER_EPOCH


@pytest.mark.parametrize("loop", ODD_LOOPS)
def test_a_cut_at_every_step_ends_on_the_same_bytes(tmp_path: Path, loop: str) -> None:
    config = RunConfig(
        recipe=f"tests.support.odd_loops:{loop}", run="r", store=str(tmp_path), epochs=3,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip
    straight, _ = live(config, TOTAL)
    saved = None
    for stop in range(1, TOTAL + 1):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(straight)
    for cut in (2, 5, 8, 13):
        assert content_id(live(config, TOTAL, live(config, cut)[0])[0]) == content_id(straight), cut
