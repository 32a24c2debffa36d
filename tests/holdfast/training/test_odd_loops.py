"""Loops that keep their state in forms in which people have it: a cut at every step changes no byte."""

from pathlib import Path

import pytest
import torch

from holdfast.config import Determinism, RunConfig
from tests.support.odd_loops import ODD_LOOPS, PER_EPOCH, make_two_layers, train_with_left_gradients
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


@pytest.mark.parametrize("to", ["left", "zero", "none"])
def test_gradients_that_a_loop_leaves_train_as_without_holdfast(tmp_path: Path, to: str) -> None:
    model, optimizer = make_two_layers()
    train_with_left_gradients(range(TOTAL), model, optimizer, to)
    config = RunConfig(
        recipe="tests.support.odd_loops:leaves_gradients", run="r", store=str(tmp_path), epochs=3, settings={"to": to},
        determinism=Determinism(mode="fast"),
    )  # fmt: skip
    saved = None
    for stop in range(1, TOTAL + 1):
        saved, training = live(config, stop, saved)
    trained = training.recipe.model.state_dict()
    assert all(torch.equal(trained[name], each) for name, each in model.state_dict().items())


@pytest.mark.parametrize(("to", "has"), [("left", True), ("zero", True), ("none", False)])
def test_only_a_loop_that_leaves_gradients_has_them_in_its_checkpoints(tmp_path: Path, to: str, has: bool) -> None:
    config = RunConfig(
        recipe="tests.support.odd_loops:leaves_gradients", run="r", store=str(tmp_path), epochs=3, settings={"to": to},
        determinism=Determinism(mode="fast"),
    )  # fmt: skip
    (payload, _), _ = live(config, TOTAL)
    assert any(".gradients." in name for name in payload.tensors) == has
