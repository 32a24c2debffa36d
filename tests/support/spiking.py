"""Recipes whose loss jumps in one step: by a sample, by a learning rate, or by a machine that computes wrongly."""

from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast import Recipe
from holdfast.training.own_loop.run import Run

SAMPLES, BATCH = 128, 16
POISONED = 77  # the index of the sample that `make_data` spoils
SPIKE_STEP = 21
# With 5 * SAMPLES samples, an epoch has 40 steps; with this seed, this step of the first epoch trains the poisoned one.
SEED, POISONED_STEP = 2, 24


class Regression(nn.Module):
    """Two layers, and the number of steps that they have been trained."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.first(given)))
        return found


def make_data(*, is_poisoned: bool, samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    """Return samples of a linear function with noise; a poisoned one has a target that is far too large."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(samples, 8, generator=generator)
    target = given @ torch.randn(8, 1, generator=generator) + 0.1 * torch.randn(samples, 1, generator=generator)
    if is_poisoned:
        target[POISONED] = 60.0
    return [*zip(given, target, strict=True)]


def spike(cause: str, flips: str = "", samples: int = SAMPLES) -> Recipe:
    """Return a recipe with a jump of the loss.

    Args:
        samples: the number of samples; with 5 times as many, the poisoned one is in a single step of 40.
        cause: ``data`` or ``dynamics``; any other text has none.
        flips: a file; while it exists, a weight is wrong after step ``SPIKE_STEP - 1``, as on a faulty machine.
    """
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def rate(step: int) -> float:
        return 200.0 if cause == "dynamics" and step == SPIKE_STEP - 2 else 1.0

    def after_step() -> None:
        model.steps.add_(1)
        if flips and int(model.steps) == SPIKE_STEP - 1 and Path(flips).exists():
            with torch.no_grad():
                model.last.weight[0, 3] += 3.0

    return Recipe(
        model=model,
        data=make_data(is_poisoned=cause == "data", samples=samples),
        batch_size=BATCH,
        optimizer=optimizer,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        after_step=after_step,
    )


def spike_on_other_data(cause: str, flips: str = "") -> Recipe:
    """Return the recipe `spike` on data in which one sample was exchanged."""
    return spike("data", flips)


def spike_in_loop(run: Run) -> None:
    """Train on the poisoned data in a loop of one's own."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.DataLoader(make_data(is_poisoned=True), batch_size=BATCH)):
        given, target = step.batch
        loss = nn.functional.mse_loss(model(given), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.log(loss=loss)


def count_epochs(run: Run) -> None:
    """Train in epochs of 8 steps, with code after the inner loop that changes the state."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(torch.utils.data.DataLoader(make_data(is_poisoned=False), batch_size=BATCH)):
        for step in run.steps():
            given, target = step.batch
            loss = nn.functional.mse_loss(model(given), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        with torch.no_grad():
            model.steps.add_(epoch + 1)
            model.last.bias.mul_(0.9)


def draw_batches(run: Run) -> None:
    """Train on batches that the loop itself draws."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=8):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step.log(loss=loss)
