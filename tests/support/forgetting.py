"""Recipes and loops that depend on something which no checkpoint has, from a chosen step on; for rehearsals."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast import Recipe


def points() -> TensorDataset:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def fit(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def exact(nap_s: float = 0.0) -> Recipe:
    """Forget nothing. Eight steps an epoch.

    Args:
        nap_s: seconds that a step takes at least.
    """
    model = net()

    def after() -> None:
        time.sleep(nap_s)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Recipe(model=model, data=points(), optimizer=optimizer, loss=fit, batch_size=4, after_step=after)


def counting(acts_after: int = 12) -> Recipe:
    """Count steps in a closure, and shrink the weights once the count is above a number."""
    recipe, seen = exact(), [0]

    def after() -> None:
        seen[0] += 1
        if seen[0] > acts_after:
            with torch.no_grad():
                recipe.model.weight.mul_(0.999)  # type: ignore[operator]

    recipe.after_step = after
    return recipe


def of_one_rank() -> Recipe:
    """Count steps in the second of several ranks, and scale its loss by the count."""
    recipe, seen = exact(), [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training and torch.is_grad_enabled() and os.environ["RANK"] == "1":
            seen[0] += 1
        return fit(model, batch) * (1 + 0.01 * seen[0])

    recipe.loss = loss
    return recipe


def crashing(folder: str) -> Recipe:
    """Crash in the first step of each process but the first."""
    recipe, claim = exact(), _Claim(folder)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if claim.turn > 1 and torch.is_grad_enabled() and model.training:
            raise ValueError("nothing cached")
        return fit(model, batch)

    recipe.loss = loss
    return recipe


def dying(folder: str) -> Recipe:
    """Kill the second process in its first step."""
    recipe, claim = exact(), _Claim(folder)

    def after() -> None:
        if claim.turn == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    recipe.after_step = after
    return recipe


def leaving(folder: str, turn: int, step: int) -> Recipe:
    """Tell one process to end in one of its steps, as a machine that goes away does."""
    recipe, claim, seen = exact(), _Claim(folder), [0]

    def after() -> None:
        seen[0] += 1
        if claim.turn == turn and seen[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    recipe.after_step = after
    return recipe


class _Claim:
    """The place of this process among those that have built the recipe, from 1."""

    def __init__(self, folder: str) -> None:
        Path(folder, f"process-{os.getpid()}").touch()
        self._turn = len(list(Path(folder).glob("process-*")))

    @property
    def turn(self) -> int:
        return self._turn


def loop(run: holdfast.Run, folder: str) -> None:
    """Log what no step reads, and note the steps that each process trains and whether each is a rehearsal."""
    model, noted = net(), Path(folder, f"{os.getpid()}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    seconds = 0.0
    for step in run.steps(DataLoader(points(), 4, shuffle=True)):
        loss = fit(model, step.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += time.time()
        step.log(loss=loss, seconds=seconds, grad_norm=seconds)
        with noted.open("a") as file:
            file.write(f"{step.number} {step.is_rehearsal}\n")


def indexed(run: holdfast.Run) -> None:
    """Lower the rate by the loop's own index of a batch in its epoch, which a resume begins anew."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(DataLoader(points(), 4, shuffle=True)):
        for index, batch in enumerate(run.batches()):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + index)
            loss = fit(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


def numbered(run: holdfast.Run) -> None:
    """Do as `indexed`, with the step's number in place of the index."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    loader = DataLoader(points(), 4, shuffle=True)
    for _ in run.epochs(loader):
        for step in run.steps():
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step.number % len(loader))
            loss = fit(model, step.batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


class Masking:
    """Collates samples, and masks some of their numbers by a generator that it makes when it needs it."""

    generator: torch.Generator | None = None

    def __call__(self, samples: list[Any]) -> Any:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return x * (torch.rand(x.shape, generator=self.generator) > 0.2), y


def collating(run: holdfast.Run, is_early: bool = False) -> None:
    """Draw from a collator's own generator, which is kept if it is made early."""
    model, collate = net(), Masking()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    if is_early:
        collate.generator = torch.Generator().manual_seed(3)
        run.keep(generator=collate.generator)
    for step in run.steps(DataLoader(points(), 4, shuffle=True, collate_fn=collate)):
        loss = fit(model, step.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss)
