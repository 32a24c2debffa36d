"""The shares of a loop of one's own, in one process: the numbers are those of the engine's loop."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Compute, Determinism, RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.training import Training, run_program, steps
from holdfast.training.recording import read_lines
from tests.support.trainings import live, live_in_chunks

SHARES = 8


def make_config(folder: Path, shares: int = SHARES, recipe: str = "looped", **settings: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.shares:{recipe}", run="r", store=str(folder), epochs=1, settings=settings,
        compute=Compute(device="cpu", virtual_ranks=shares), determinism=Determinism(mode="fast"),
    )  # fmt: skip


def read_trail(config: RunConfig, stop: int) -> list[dict[str, Any]]:
    """Train to a step. Return the trail, with the facts of each share."""
    found: list[dict[str, Any]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        training.record.is_detailed = True
        yield from steps(training, stop, lambda: False)
        found.extend(read_lines(training))

    run_program(config, serve)
    return found


@pytest.mark.parametrize("shares", [0, SHARES])
def test_cut_at_every_step_a_loop_ends_on_the_same_bytes(tmp_path: Path, shares: int) -> None:
    config = make_config(tmp_path, shares)
    assert live_in_chunks(config, 6, 1) == live_in_chunks(config, 6, 6)


def test_a_loop_trains_the_shares_of_the_engines_loop(tmp_path: Path) -> None:
    """Loss, gradient, samples and random numbers of each share are equal to the bit, also after a step of weights."""
    ours, theirs = (read_trail(make_config(tmp_path, recipe=name), 2) for name in ("looped", "averaged"))
    for mine, other in zip(ours, theirs, strict=True):
        assert [mine[fact] for fact in ("loss", "grad_norm", "samples", "rng")] == [
            other[fact] for fact in ("loss", "grad_norm", "samples", "rng")
        ]
        *shares, _ = zip(mine["parts"], other["parts"], strict=True)
        for own, expected in shares:
            assert own | {"buffers": ""} == expected | {"buffers": ""}  # the loop's has those of the average


@pytest.mark.parametrize("shares", [0, SHARES])
def test_what_is_logged_in_the_loop_over_shares_is_averaged(tmp_path: Path, shares: int) -> None:
    (line,) = read_trail(make_config(tmp_path, shares), 1)
    assert line["logged"]["part"] == 0.5


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "whole",
            "compute.virtual_ranks = 8: the loop took a whole batch, but virtual ranks train each batch in shares",
        ),
        ("leaves", "compute.virtual_ranks = 8: step 1 did not train all shares of its batch"),
        ("twice", r"step.shares\(\) was called twice in step 1"),
        ("steps", "the parameters were changed by code that trains only a share of a batch"),
        ("counts", "the extras were changed by code that trains only a share of a batch"),
        ("logs", "the shares of a batch have logged numbers of different names.*: loss, part, and late, loss, part"),
        ("lazy", "clear gradients that no optimizer has used"),
    ],
)
def test_a_mistake_is_refused_at_the_users_line(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as found:
        live(make_config(tmp_path, how=how), 2)
    assert "/tests/support/shares.py:" in str(found.value)
    assert found.value.hint


@pytest.mark.parametrize(
    ("loop", "settings", "said"),
    [
        ("shares:loaded", {"batch_size": 12}, "a batch of 12 samples in equal shares"),
        ("shares:loaded", {"drop_last": False}, "a pass's last batch of 10 samples in equal shares"),
        ("loops:nodes", {}, "this data, which can't be divided into shares"),
        ("loops:plain", {}, "this data, which can't be divided into shares"),
    ],
)
def test_data_that_cannot_be_cut_into_shares_is_refused(
    tmp_path: Path, loop: str, settings: dict[str, Any], said: str
) -> None:
    update = {"recipe": f"tests.support.{loop}", "settings": settings}
    with pytest.raises(ConfigError, match=f"virtual ranks can't train {said}") as found:
        live(make_config(tmp_path).model_copy(update=update), 1)
    assert found.value.hint


def test_a_loop_that_takes_a_loaders_batches_as_a_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the loop took a whole batch, but virtual ranks train each batch in shares"):
        live(make_config(tmp_path, recipe="loaded", is_whole=True), 1)


@pytest.mark.parametrize("recipe", ["loaded", "from_loader"])
def test_shares_of_a_loaders_batches_are_cut_at_every_step(tmp_path: Path, recipe: str) -> None:
    config = make_config(tmp_path, recipe=recipe).model_copy(update={"epochs": 3})
    assert live_in_chunks(config, 9, 1) == live_in_chunks(config, 9, 9)
