"""Recipes for virtual ranks: dropout, batch statistics, a buffer, clipping, accumulation, an average of the weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset

from holdfast import Recipe, Schedule
from tests.support.device import device_of
from tests.support.varied import Points

BATCH_SIZE = 16
GRAD_ACCUM = 2
COPIES = 4  # of the points: six steps an epoch


class Counted(nn.Module):
    """A layer that counts its calls in training in a buffer, and scales its input by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Varied(nn.Module):
    """A small network in blocks, whose sizes no number of ranks divides: dropout, batch statistics, tied weights.

    Args:
        is_alike: whether all shares use the same parameters, as FSDP2 needs it without virtual ranks.
    """

    def __init__(self, width: int = 31, *, is_alike: bool = False) -> None:
        super().__init__()
        self.is_alike = is_alike
        self.counted = Counted()
        self.first, self.tied = nn.Linear(8, width), nn.Linear(8, width)
        self.tied.weight = self.first.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.head = nn.Linear(width, 1)
        self.sometimes = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, points: Tensor) -> Tensor:
        """Return a number for each point; shape (n, 1). Only some of the shares use ``sometimes``, or all."""
        points = self.counted(points)
        found = self.first(points) + self.tied(points)
        for block in (*self.blocks, self.blocks[0]):
            found = found + block(found)
        out: Tensor = self.head(found) * self.frozen.mean()
        return out * self.sometimes if self.is_alike or bool(points[0, 0] > 0) else out


def averaged(how: str = "") -> Recipe:
    """Build a small network and an average of its weights.

    Args:
        how: ``counts`` changes an extra in the loss, which virtual ranks can't train; with ``alike`` all shares use the
            same parameters.
    """
    model = Varied(is_alike=how == "alike")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    seen = nn.BatchNorm1d(8)  # only its statistics are used

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, targets = batch
        if how == "counts":
            seen.train()(points)
        return F.mse_loss(model(points + 0.01 * torch.randn_like(points)), targets)

    return Recipe(
        model=model,
        data=ConcatDataset([Points(noise=True)] * COPIES),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=loss,
        batch_size=BATCH_SIZE,
        grad_accum=GRAD_ACCUM,
        clip_norm=0.5,
        schedule=Schedule("cosine", epochs=6),
        extras={"average": average, **({"seen": seen} if how == "counts" else {})},
        after_step=lambda: average.update_parameters(model),
        evaluate=lambda model: {"size": model(torch.ones(2, 8, device=device_of(model))).sum()},
    )


def counted() -> Recipe:
    """Build a model whose buffer changes the loss."""
    model = nn.Sequential(Counted(), nn.Linear(8, 1))
    return Recipe(
        model=model,
        data=ConcatDataset([Points(noise=False)] * COPIES),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        batch_size=BATCH_SIZE,
    )


def sparse() -> Recipe:
    """Build an embedding with a sparse gradient."""
    model = nn.Embedding(8, 1, sparse=True)
    return Recipe(
        model=model,
        data=Points(noise=False),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch[0].argmax(1)).square().mean(),
        batch_size=BATCH_SIZE,
    )


def plain() -> Recipe:
    """Build a network without anything that depends on the share that a sample is in."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return Recipe(
        model=model,
        data=Points(noise=False),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        batch_size=BATCH_SIZE,
        clip_norm=0.5,
    )
