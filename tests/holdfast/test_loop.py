"""What one step does to the weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Recipe
from tests.trainings import make, train_to

START = [1.0, 2.0]


class Slope(nn.Module):
    """The gradient of its weights is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(START))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weights * slope).sum()


def slope(gradient: list[float], clip_norm: float | None = None) -> Recipe:
    """Each step goes down by the gradient."""
    model = Slope()
    return Recipe(
        model=model, data=[torch.zeros(1)] * 4, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), batch_size=1,
        loss=lambda model, batch: model(torch.tensor(gradient)), clip_norm=clip_norm,
    )  # fmt: skip


def step(folder: Path, gradient: list[float], **settings: Any) -> tuple[list[float], float]:
    """By how much one step moves the weights, and the norm that is on record."""
    training = make(folder, "tests.holdfast.test_loop:slope", gradient=gradient, **settings)
    train_to(training, 1)
    (line,) = training.read_metrics()
    return (torch.tensor(START) - training.recipe.model.weights.detach()).tolist(), line["grad_norm"]  # type: ignore[operator]


def test_a_gradient_is_clipped_to_the_recipes_norm(tmp_path: Path) -> None:
    moved, norm = step(tmp_path, [3.0, 4.0], clip_norm=1.0)
    assert (moved, norm) == (pytest.approx([0.6, 0.8]), 5.0)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": math.inf}])
def test_without_a_limit_it_is_left_as_it_is(tmp_path: Path, settings: dict[str, float]) -> None:
    assert step(tmp_path, [3.0, 4.0], **settings) == ([3.0, 4.0], 5.0)
    # Clipped to infinity, both would be NaN.
    assert step(tmp_path, [math.inf, 4.0], **settings) == ([math.inf, 4.0], math.inf)
