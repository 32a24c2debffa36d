"""Recipes that each forget to register some state; `tests.support.mutants` says what finds it."""

import copy
import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import default_collate

from holdfast import Recipe
from tests.support.varied import Average, Normaliser, Points

Loss = Callable[[nn.Module, Any], Tensor]
calls = strikes = 0


def make(model: nn.Module, loss: Loss, **parts: Any) -> Recipe:
    """Build a recipe of six steps an epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    fields = {"model": model, "data": Points(False), "optimizer": optimizer, "loss": loss, "batch_size": 8}
    return Recipe(**fields | parts)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


def fit(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def average() -> Recipe:
    """Build a recipe with an average that only evaluation reads."""
    model = net()
    average = Average(model)
    return make(model, fit, after_step=average.update, evaluate=lambda model: {"mean": average.mean["0.weight"].sum()})


def plain_average() -> Recipe:
    """Build the same recipe with the average in a plain dict of tensors."""
    model = net()
    mean = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update() -> None:
        for name, value in model.named_parameters():
            mean[name].lerp_(value.detach(), 0.1)

    return make(model, fit, after_step=update, evaluate=lambda model: {"mean": mean["0.weight"].sum()})


def target(of: str = "model", every: int = 50) -> Recipe:
    """Build a recipe with a target network that copies the model, or a part of it, every few steps."""
    model = net()
    source = model if of == "model" else model[0]
    target = copy.deepcopy(source)
    steps = 0

    def follow() -> None:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            target.load_state_dict(source.state_dict())

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            aim = target(batch[0]).mean()
        return fit(model, batch) + 0.1 * (model(batch[0]).mean() - aim).square()

    return make(model, loss, after_step=follow)


def noise() -> Recipe:
    """Build a recipe with noise that only training adds, and that grows in every step."""
    model, size = net(), [0.0]

    def grow() -> None:
        size[0] += 0.1

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return fit(model, (x + size[0] * torch.randn_like(x) if model.training else x, y))

    return make(model, loss, after_step=grow)


def dropout() -> Recipe:
    """Build a recipe whose after_step raises a dropout rate."""
    dropout = nn.Dropout(0.1)

    def grow() -> None:
        dropout.p = min(0.5, dropout.p + 0.02)

    return make(nn.Sequential(nn.Linear(8, 6), dropout, nn.Linear(6, 1)), fit, after_step=grow)


def torch_generator() -> Recipe:
    generator = torch.Generator().manual_seed(3)
    return make(net(), lambda model, batch: fit(model, batch) * (1 + torch.rand((), generator=generator)))


def numpy_generator() -> Recipe:
    noise = np.random.default_rng(3)

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + 0.1 * float(noise.normal()), y

    return make(net(), fit, collate=collate)


class Augmented(Points):
    def __init__(self) -> None:
        super().__init__(noise=False)
        self.random = random.Random(3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * self.random.random(), y


def python_generator() -> Recipe:
    return make(net(), fit, data=Augmented())


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.heads = [nn.Linear(6, 1), nn.Linear(6, 1)]  # no nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        return sum(head(self.body(x)) for head in self.heads)  # type: ignore[return-value]


def heads() -> Recipe:
    model = Headed()
    parameters = [*model.parameters(), *(each for head in model.heads for each in head.parameters())]
    return make(model, fit, optimizer=torch.optim.SGD(parameters, 0.05))


class Judged:
    """A critic of the model, with an optimizer of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.critic = nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), 0.05)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        if model.training:
            judged = self.critic(batch[1]).mean() - self.critic(made.detach()).mean()
            self.critic_optimizer.zero_grad()
            (-judged).backward()
            self.critic_optimizer.step()
        return F.mse_loss(made, batch[1]) - 0.1 * self.critic(made).mean()


def critic() -> Recipe:
    """Build a recipe that registers a critic but not the critic's optimizer; the probe uses neither."""
    model = net()
    judged = Judged(model)
    probe = lambda model: {"output": model(torch.ones(2, 8))}  # noqa: E731
    return make(model, judged.loss, extras={"critic": judged.critic}, probe=probe)


def scheduler() -> Recipe:
    """Build a recipe whose after_step steps a scheduler that nobody registered."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=20)
    return make(model, fit, optimizer=optimizer, after_step=lambda: warmup.step())


def _normalised_fit(model: nn.Module, batch: tuple[Tensor, Tensor], *, normaliser: Normaliser) -> Tensor:
    return fit(model, (normaliser.see(batch[0]), batch[1]))


def normaliser() -> Recipe:
    probe = lambda model: {"output": model(torch.ones(2, 8))}  # noqa: E731
    return make(net(), functools.partial(_normalised_fit, normaliser=Normaliser()), probe=probe)


def _count() -> int:
    global calls
    calls += 1
    return calls


def counter(rank: int = 0) -> Recipe:
    """Build a recipe with a global count that affects one rank's loss; the search and the probe don't see it."""
    probe = lambda model: {"output": model(torch.ones(2, 8))}  # noqa: E731
    weight = 0.001 * (int(os.environ.get("RANK", 0)) == rank)
    return make(net(), lambda model, batch: fit(model, batch) * (1 + weight * _count()), probe=probe)


class Drifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(), 0.1)
        return self.linear(x - self.mean * self.training)  # type: ignore[no-any-return]


def buffer() -> Recipe:
    return make(Drifting(), fit)


class Counting(nn.Module):
    """A layer that counts its calls in a plain attribute, and acts on the count once it is above ``after``."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.calls, self.after = 0, after

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.linear(x) * (1 + 0.01 * max(0, self.calls - self.after))  # type: ignore[no-any-return]


def late(after: int = 4) -> Recipe:
    """Build a recipe that forgets its model's count of calls, which changes a step only later."""
    return make(Counting(after), fit)


def loading() -> Recipe:
    """Build a recipe whose model changes a weight whenever it is loaded."""
    model = net()
    model.register_load_state_dict_pre_hook(lambda module, state, *_: state["0.bias"].add_(1))
    return make(model, fit)


def _is_struck(once: str) -> bool:
    global strikes
    if Path(once).exists():
        Path(once).unlink()
        strikes += 1
    return strikes > 0


def struck(once: str = "") -> Recipe:
    """Build a recipe that computes wrongly in one process: the first that takes a loss after ``once`` exists."""
    return make(net(), lambda model, batch: fit(model, batch) * (1 + 0.001 * _is_struck(once)))


def reading(path: str) -> Recipe:
    """Build a recipe whose loss reads a file at each call."""
    return make(net(), lambda model, batch: fit(model, batch) * float(Path(path).read_text()))
