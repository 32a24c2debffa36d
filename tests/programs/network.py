"""A small network, its data and its step, which the programs of this folder share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from holdfast import Recipe, Run

Batch = tuple[Tensor, Tensor]
PER_EPOCH = 8
BATCH_SIZE = 8
# Steps of an epoch of ordinary programs: two chunks, and more steps in each than a rehearsal trains.
LONG_EPOCH = 10


def points(count: int = PER_EPOCH * BATCH_SIZE) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sum(1, keepdim=True))


def long_points(count: int = LONG_EPOCH * BATCH_SIZE) -> TensorDataset:
    return points(count)


def net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def fit(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make(loss: Any = fit, model: nn.Module | None = None, **parts: Any) -> Recipe:
    """Build a recipe of eight steps an epoch."""
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fields = {"model": model, "data": points(), "optimizer": optimizer, "loss": loss, "batch_size": BATCH_SIZE}
    return Recipe(**fields | parts)


def make_long(loss: Any = fit, model: nn.Module | None = None, **parts: Any) -> Recipe:
    """Build a recipe of ten steps an epoch."""
    return make(loss, model, **{"data": long_points()} | parts)


def begin(run: Run, model: nn.Module | None = None, **kept: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Build a model and its optimizer, and keep them."""
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, **kept)
    return model, optimizer


def draw() -> Batch:
    x = torch.randn(BATCH_SIZE, 8)
    return x, x.sum(1, keepdim=True)


def learn(loss: Tensor, *optimizers: torch.optim.Optimizer) -> Tensor:
    for each in optimizers:
        each.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for each in optimizers:
        each.step()
    return loss


def grow(count: float, after: int) -> float:
    """Return 1 up to a count, and more beyond it."""
    return 1 + 0.01 * max(0.0, float(count) - after)


class Clock:
    """The number of steps so far: state that is registered."""

    def __init__(self) -> None:
        self.steps = 0

    def tick(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]
