"""Recipes and a loop for virtual ranks: dropout, batch statistics, a buffer, clipping, accumulation, an average."""

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset

from holdfast import Recipe, Run, Schedule
from tests.support.device import DEVICE, device_of
from tests.support.varied import Points

BATCH_SIZE = 16
GRAD_ACCUM = 2
COPIES = 4  # of the points: six steps an epoch
SHARES = 8

with contextlib.suppress(ImportError):
    from holdfast.extensions.virtual_ranks import buckets

    buckets.BUCKET_BYTES = 600  # so that these small networks fill several buckets


def write_config(
    folder: Path,
    ranks: int,
    epochs: int,
    parallel: str = "ddp",
    recipe: str = "averaged",
    chunk_steps: int = 2,
    shares: int = SHARES,
    mesh: str = "",
    **settings: str,
) -> str:
    """Write a run's configuration into the folder; return its path."""
    place = recipe if ":" in recipe else f"shares:{recipe}"
    lines = [
        f'recipe = "tests.support.{place}"', 'run = "r"', f"store = {json.dumps(str(folder))}",
        f"epochs = {epochs}", f"chunk.steps = {chunk_steps}", f"compute.ranks = {ranks}",
        f"compute.virtual_ranks = {shares}", f'compute.parallel = "{parallel}"', f'compute.device = "{DEVICE}"',
        'compute.mixed_precision = "bf16"', "retention.keep_last = 99", f"log.folder = {json.dumps(str(folder))}",
        *([f"compute.mesh = {mesh}"] if mesh else []),
        *(f"settings.{name} = {json.dumps(value)}" for name, value in settings.items()),
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    path = folder / "config.toml"
    path.write_text("\n".join(lines))
    return str(path)


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
            same parameters; ``slow`` sleeps in the second rank's loss.
    """
    model = Varied(is_alike=how == "alike")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    seen = nn.BatchNorm1d(8)  # only its statistics are used

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, targets = batch
        if how == "counts":
            seen.train()(points)
        if how == "slow" and os.environ.get("RANK") == "1":
            time.sleep(0.01)
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


def synced() -> Recipe:
    recipe = averaged()
    recipe.model = nn.SyncBatchNorm.convert_sync_batchnorm(recipe.model)
    return recipe


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


def loader_of(batch_size: int = BATCH_SIZE, *, drop_last: bool = True) -> DataLoader[Any]:
    """Return a shuffled loader, whose passes end with ten samples of a batch."""
    data = ConcatDataset([Points(noise=True)] * COPIES)
    return DataLoader(Subset(data, range(6 * BATCH_SIZE + 10)), batch_size, shuffle=True, drop_last=drop_last)


def loaded(run: Run, drop_last: bool = True, batch_size: int = BATCH_SIZE, is_whole: bool = False) -> None:
    """Train a network in a loop over a loader.

    Args:
        is_whole: whether to take each batch as a whole.
    """
    torch.manual_seed(run.config.seed)
    model: Any = run.wrap(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(loader_of(batch_size, drop_last=drop_last)):
        for points, targets in [step.batch] if is_whole else step.shares():
            loss = F.mse_loss(model(points), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            step.log(loss=loss)
        optimizer.step()


def from_loader() -> Recipe:
    """Build a network with dropout, whose data is a loader."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    return replace(
        plain(), model=model, optimizer=torch.optim.AdamW(model.parameters()), data=loader_of(), batch_size=None
    )


def looped(run: Run, how: str = "") -> None:
    """Train the network of `averaged` in a loop of one's own.

    Args:
        how: empty, ``alike`` (see `averaged`), ``two`` (train a second module), or a mistake to make.
    """
    torch.manual_seed(run.config.seed)
    model: Any = Varied(is_alike=how == "alike")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    model = model if how == "unwrapped" else run.wrap(model)
    run.wrap(average.module)
    outer = run.wrap(nn.Linear(1, 1)) if how == "two" else nn.Identity()
    parameters = [*model.parameters(), *outer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    noise, counts = run.generator("noise"), {"seen": 0}
    run.keep(model=model, outer=outer, average=average, optimizer=optimizer, scheduler=scheduler, counts=counts)
    batches = run.batches(ConcatDataset([Points(noise=True)] * COPIES), batch_size=BATCH_SIZE, grad_accum=GRAD_ACCUM)
    for step in run.steps():
        model.train()
        if how == "whole":
            next(batches)
        for number, (points, targets) in enumerate(step.shares()):
            loss = F.mse_loss(outer(model(points + 0.01 * torch.randn_like(points))), targets)
            (loss / GRAD_ACCUM).backward()  # type: ignore[no-untyped-call]
            step.log(
                loss=loss, part=number % GRAD_ACCUM, **({"late": 1.0} if how == "logs" and number > GRAD_ACCUM else {})
            )
            if how == "steps":
                optimizer.step()
            counts["seen"] += how == "counts"
            if how == "leaves":
                break
        if how == "twice":
            next(step.shares())
        norm = run.clip_grad_norm_(parameters, 0.5)
        if how != "lazy":
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
        step.log(grad_norm=norm, noise=torch.rand(1, generator=noise))
