"""One step of the loop: clipping, and metrics that are measured."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Recipe, checkpoint
from holdfast.machine.determinism import reseed
from holdfast.proof.differing import find_difference
from holdfast.store.local import LocalStore
from holdfast.training.recording import read_lines
from tests.support.trainings import make, save_step, train_to

START = [1.0, 2.0]


class Slope(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(START))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weights * slope).sum()


def slope(gradient: list[float], clip_norm: float | None = None) -> Recipe:
    """Build a recipe whose steps subtract the gradient."""
    model = Slope()
    return Recipe(
        model=model, data=[torch.zeros(1)] * 4, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), batch_size=1,
        loss=lambda model, batch: model(torch.tensor(gradient)), clip_norm=clip_norm,
    )  # fmt: skip


def step(folder: Path, gradient: list[float], **settings: Any) -> tuple[list[float], float]:
    """Train one step. Return the change of the weights, and the recorded norm."""
    training = make(folder, "tests.holdfast.training.test_loop:slope", gradient=gradient, **settings)
    train_to(training, 1)
    (line,) = read_lines(training)
    return (torch.tensor(START) - training.recipe.model.weights.detach()).tolist(), line["grad_norm"]  # type: ignore[operator]


def test_a_gradient_is_clipped_to_the_recipes_norm(tmp_path: Path) -> None:
    moved, norm = step(tmp_path, [3.0, 4.0], clip_norm=1.0)
    assert (moved, norm) == (pytest.approx([0.6, 0.8]), 5.0)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": math.inf}])
def test_without_clip_norm_the_gradient_stays_unchanged(tmp_path: Path, settings: dict[str, float]) -> None:
    assert step(tmp_path, [3.0, 4.0], **settings) == ([3.0, 4.0], 5.0)
    # Clipped to infinity, both would be NaN.
    assert step(tmp_path, [math.inf, 4.0], **settings) == ([math.inf, 4.0], math.inf)


@pytest.mark.usefixtures("same_process")
def test_a_measured_metric_is_logged_and_not_part_of_the_state(tmp_path: Path) -> None:
    """Two trainings measure other times and memory, and are saved as the same bytes."""
    stores = [LocalStore(str(tmp_path / name)) for name in ("one", "other")]
    trainings = [make(tmp_path, "tests.support.varied:timed") for _ in stores]
    saved = []
    for training, store in zip(trainings, stores, strict=True):
        reseed(training.config.seed)
        train_to(training, 2 * training.steps_per_epoch)
        saved.append(save_step(training, store))
    one, other = (each.metadata for each in saved)
    assert one.checkpoint_sha256 == other.checkpoint_sha256
    assert one.metrics.keys() == {"loss", "eval_s", "memory_mb"}
    assert one.metrics["eval_s"] != other.metrics["eval_s"]
    line, other_line = ([json.loads(line) for line in store.read(f"{each.path}/{checkpoint.METRICS}").splitlines()][-1]
                        for store, each in zip(stores, saved, strict=True))  # fmt: skip
    assert line["measured"] != other_line["measured"]
    assert line.keys() >= {"metrics", "measured"}
    assert find_difference(([line], [other_line])) == {}
    assert trainings[0].progress.history[-1]["metrics"].keys() == {"loss"}
