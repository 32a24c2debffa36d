"""Recipes that vary in what the next step depends on: the optimizer, the schedulers, and state of many kinds."""

import dataclasses
import random
import sysconfig
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from holdfast import Anneal, Recipe, Schedule
from holdfast.recipes.language import language
from tests.support.device import device_of

SAMPLES = 48
STEPS_PER_EPOCH = 6
EPOCHS = 3


def build_optimizer(name: str, groups: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True)


def build_schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """Build Holdfast's linear schedule, or torch's own schedulers."""
    if name == "linear":
        return Schedule("linear", epochs=EPOCHS, warmup_steps=2, final_lr_scale=0.1)
    if name == "step":
        return StepLR(optimizer, step_size=5, gamma=0.5)
    if name == "cosine":
        return CosineAnnealingLR(optimizer, T_max=EPOCHS * STEPS_PER_EPOCH)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=4)
    return [warmup, ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)]


def varied_language(optimizer: str = "adamw", schedule: str = "linear") -> Recipe:
    """Build a very small language model on a few modules of the standard library."""
    data = f"{sysconfig.get_paths()['stdlib']}/json/*.py"
    recipe = language(
        data=data, context=32, layers=1, heads=2, width=32, dropout=0.1, batch_size=4, steps_per_epoch=STEPS_PER_EPOCH
    )
    chosen = build_optimizer(optimizer, recipe.optimizer.param_groups)
    return dataclasses.replace(recipe, optimizer=chosen, schedule=build_schedule(schedule, chosen))


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of a linear function. With ``noise``, random numbers of all kinds are added to each point at each read."""

    def __init__(self, noise: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * np.random.random()
        return x, self.y[index]


class Average:
    """An exponential average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mean = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self) -> None:
        for name, value in self.model.named_parameters():
            self.mean[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self.mean

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self.mean[name].copy_(value)


def averaged(optimizer: str = "adamw", schedule: str = "linear") -> Recipe:
    """Build a recipe with dropout, batch norm, noise, and an average of the weights that the loss pulls towards."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    average = Average(model)
    chosen = build_optimizer(optimizer, [{"params": model[0].parameters()}, {"params": model[1:].parameters()}])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        pull = sum((value - average.mean[name]).square().sum() for name, value in model.named_parameters())
        return F.mse_loss(model(x + 0.01 * np.random.random()), y) + 0.1 * pull

    return Recipe(
        model=model, data=Points(noise=True), optimizer=chosen, loss=loss, batch_size=4, grad_accum=2, clip_norm=1.0,
        steps_per_epoch=STEPS_PER_EPOCH, schedule=build_schedule(schedule, chosen), after_step=average.update,
        extras={"average": average}, evaluate=lambda model: {"weight": next(model.parameters()).sum()},
    )  # fmt: skip


class Replay:
    """State in plain Python: generators of its own, a buffer of tuples, and a running mean."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.numpy = np.random.default_rng(4)
        self.buffer: list[tuple[int, float]] = []
        self.mean, self.count = 0.0, 0

    def see(self, loss: float) -> float:
        self.count += 1
        self.mean += (loss - self.mean) / self.count
        self.buffer = [*self.buffer[-4:], (self.count, loss)]
        return self.random.choice(self.buffer)[1] + float(self.numpy.normal()) - self.mean

    def state_dict(self) -> dict[str, Any]:
        generators = {"random": self.random.getstate(), "numpy": self.numpy.bit_generator.state}
        return generators | {"buffer": self.buffer, "mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])
        self.numpy.bit_generator.state = state["numpy"]
        self.buffer, self.mean, self.count = state["buffer"], state["mean"], state["count"]


def pythonic(optimizer: str = "adamw", schedule: str = "linear") -> Recipe:
    """Build a recipe whose loss reads Python-level state and an anneal, and draws from every global generator."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))
    chosen = build_optimizer(optimizer, model.parameters())
    replay = Replay()
    temperature = Anneal(1.0, 0.1, epochs=2, start_frac=0.25)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        noise = random.random() + np.random.random() + torch.rand(()).item()
        plain = F.mse_loss(model(x + 0.01 * noise), y)
        return plain * (1.0 + 0.01 * temperature.value * replay.see(plain.item()))

    return Recipe(
        model=model, data=Points(noise=False), optimizer=chosen, loss=loss, batch_size=8,
        steps_per_epoch=STEPS_PER_EPOCH, schedule=build_schedule(schedule, chosen), extras={"replay": replay},
        anneals={"temperature": temperature}, probe=lambda model: {"output": model(torch.ones(2, 8))},
    )  # fmt: skip


class Normaliser:
    """A running mean of the inputs of its own rank."""

    def __init__(self) -> None:
        self.mean = 0.0

    def see(self, x: Tensor) -> Tensor:
        self.mean += 0.1 * (x.mean().item() - self.mean)
        return x - self.mean

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean = state["mean"]


def normalised() -> Recipe:
    """Build a recipe in which each rank has a normaliser of its own, which the probe reads."""
    model = nn.Linear(8, 1)
    normaliser = Normaliser()
    return Recipe(
        model=model, data=Points(noise=False), optimizer=torch.optim.SGD(model.parameters(), 0.05),
        loss=lambda model, batch: F.mse_loss(model(normaliser.see(batch[0])), batch[1]), batch_size=8,
        extras={"normaliser": normaliser},
        probe=lambda model: {"mean": normaliser.mean, "output": model(torch.ones(8, device=device_of(model)))},
    )  # fmt: skip


def timed() -> Recipe:
    """Build a recipe whose evaluation also measures its time and its memory."""
    model = nn.Linear(8, 1)
    data = Points(noise=False)

    def evaluate(model: nn.Module) -> dict[str, float]:
        began = time.perf_counter()
        loss = F.mse_loss(model(data.x), data.y).item()
        return {"loss": loss, "eval_s": time.perf_counter() - began, "memory_mb": random.SystemRandom().random()}

    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    return Recipe(
        model=model, data=data, optimizer=optimizer, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        batch_size=8, evaluate=evaluate, measured=["memory_mb"],
        schedule=[ReduceLROnPlateau(optimizer, factor=0.5, patience=0)],
    )  # fmt: skip


class Numbers(IterableDataset[Tensor]):
    """A stream without a position: the same numbers with each iterator, with noise."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, 37, every):
            yield torch.full((8,), number / 37) + 0.1 * torch.randn(8)


class Counted(Numbers):
    """The same stream with a position that it saves."""

    def __init__(self) -> None:
        self.given = self.skip = 0

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        self.given, self.skip = self.skip, 0
        for number in range(first + self.given * every, 37, every):
            self.given += 1
            yield torch.full((8,), number / 37) + 0.1 * torch.randn(8)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


def streamed(keeps_position: bool = True) -> Recipe:
    """Build a recipe of a stream whose passes end inside a micro-batch."""
    model = nn.Linear(8, 1)
    data = Counted() if keeps_position else Numbers()
    return Recipe(
        model=model, data=data, optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda model, x: (model(x).squeeze() - x.sum(1)).square().mean(), batch_size=4,
        steps_per_epoch=STEPS_PER_EPOCH, probe=lambda model: {"output": model(torch.ones(2, 8))},
    )  # fmt: skip
