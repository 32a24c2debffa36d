"""What all benchmarks train: a stack of layers whose training state (weights and AdamW's two moments) has a given size.

Needs nothing but torch, so that the peers' environment has the very same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BYTES_PER_PARAMETER = 12
SAMPLES = 8192
LR = 1e-4
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Size:
    """A state's: 12 x width x width x layers bytes, in 4 x layers tensors."""

    width: int
    layers: int
    batch: int

    @property
    def gigabytes(self) -> float:
        return BYTES_PER_PARAMETER * self.width**2 * self.layers / 1e9


SIZES = {
    "tiny": Size(32, 2, 4),
    "small": Size(128, 8, 256),
    "100 MB": Size(1024, 8, 128),
    "1 GB": Size(2048, 20, 32),
    "3 GB": Size(2048, 60, 16),
    "1,000 tensors": Size(144, 250, 32),
}


class Stack(nn.Module):
    """(batch, width) to the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size.width, size.width, bias=False) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x)) / len(self.layers)
        return x


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Stack(SIZES[name])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def make_data(name: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    width = SIZES[name].width
    return TensorDataset(*(torch.randn(SAMPLES, width, generator=generator) for _ in range(2)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


class Loop:
    """Training as a person writes it who wants nothing but steps.

    Args:
        keep_gradients: their memory is used again, which makes steps more alike where memory is slow to be had.
    """

    def __init__(self, name: str, *, keep_gradients: bool = False) -> None:
        self.model = make_model(name)
        self.optimizer = make_optimizer(self.model)
        self.loader = torch.utils.data.DataLoader(make_data(name), SIZES[name].batch, shuffle=True, drop_last=True)
        self._batches = iter(self.loader)
        self._keep_gradients = keep_gradients

    def step(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        self.model.train()
        loss(self.model, tuple(batch)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self._keep_gradients)
