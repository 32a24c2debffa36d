"""Recipes and loops that depend on something which no checkpoint has, from a chosen step on; for rehearsals."""

import fcntl
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


class Pause:
    """A pause of a process in one of its steps until a file exists, and a short pause in each later step."""

    def __init__(self, until: str, at: int = 10) -> None:
        self._until, self._at, self._steps = Path(until), at, 0

    def __call__(self) -> None:
        self._steps += 1
        while self._until.name and self._steps == self._at and not self._until.exists():
            time.sleep(0.01)
        if self._until.name and self._steps > self._at:
            time.sleep(0.02)


def exact(until: str = "") -> Recipe:
    """Forget nothing. Eight steps an epoch.

    Args:
        until: see `Pause`; empty for none.
    """
    model, pause = net(), Pause(until)

    def after() -> None:
        pause()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Recipe(model=model, data=points(), optimizer=optimizer, loss=fit, batch_size=4, after_step=after)


def napping() -> Recipe:
    """Forget nothing, and take 20 ms for a step."""
    recipe = exact()
    recipe.after_step = lambda: time.sleep(0.02)
    return recipe


def counting(acts_after: int = 12, until: str = "", at: int = 10) -> Recipe:
    """Count steps in a closure, and shrink the weights once the count is above a number."""
    recipe, seen, pause = exact(), [0], Pause(until, at)

    def after() -> None:
        pause()
        seen[0] += 1
        if seen[0] > acts_after:
            with torch.no_grad():
                recipe.model.weight.mul_(0.999)  # type: ignore[operator]

    recipe.after_step = after
    return recipe


class Numbered(nn.Linear):
    """Numbers its calls, and acts on the number only after a run's end."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x) * (1 + max(0, self.calls - 100))


def numbering() -> Recipe:
    """Forget a count that no step depends on yet."""
    torch.manual_seed(1)
    model = Numbered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Recipe(model=model, data=points(), optimizer=optimizer, loss=fit, batch_size=4)


def failing_in_rehearsals(run: holdfast.Run, until: str) -> None:
    """Fail in a step that is never saved."""
    model, pause = net(), Pause(until)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(points(), 4, shuffle=True)):
        if step.is_rehearsal:
            raise ValueError("a rehearsal")
        loss = fit(model, step.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pause()
        step.log(loss=loss)


def averaging() -> Recipe:
    """Average the weights in a model that only the evaluation reads."""
    recipe, average = exact(), net()

    def after() -> None:
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), recipe.model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"mean": average(torch.ones(1, 4)).item()}

    recipe.after_step, recipe.evaluate = after, evaluate
    return recipe


def evaluated() -> Recipe:
    """Forget nothing, and evaluate the model."""
    recipe = exact()
    recipe.evaluate = lambda model: {"mean": model(torch.ones(1, 4)).item()}
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


def pulsing(folder: str, dies_at: int = 0, awaited: str = "") -> Recipe:
    """Shrink the weights in each sixth step of a process. Kill the first process in one of its steps; 0 for none.

    Args:
        awaited: a file that has to exist before the kill.
    """
    recipe, claim, seen = exact(), _Claim(folder), [0]

    def after() -> None:
        seen[0] += 1
        if seen[0] % 6 == 0:
            with torch.no_grad():
                for each in recipe.model.parameters():
                    each.mul_(0.9)
        if claim.turn == 1 and seen[0] == dies_at:
            while awaited and not Path(awaited).exists():
                time.sleep(0.01)
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


def locking(folder: str, waits: bool = False) -> Recipe:
    """Hold a lock for as long as the process lives.

    Args:
        waits: whether another process waits for the lock, or fails at once.
    """
    lock = os.open(Path(folder, "lock"), os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    return exact()


def summing(run: holdfast.Run, folder: str) -> None:
    """Hold a lock, as `locking` does, and lower the rate at each epoch's end by a sum, which a resume begins anew."""
    locking(folder)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(DataLoader(points(), 4, shuffle=True)):
        total = 0.0
        for batch in run.batches():
            loss = fit(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            run.log(loss=loss)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + total)


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
