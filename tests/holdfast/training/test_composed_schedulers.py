"""Settings that were changed on purpose reach the schedulers inside other schedulers."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from holdfast import Recipe, state
from holdfast.training import Training, capturing, merging
from tests.support import trainings
from tests.support.trainings import train_to
from tests.support.varied import Points

pytestmark = pytest.mark.usefixtures("same_process")


def scheduled(kind: str, lr: float = 0.1, length: int = 20) -> Recipe:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Recipe(
        model=model, data=Points(noise=False), optimizer=optimizer, batch_size=4, steps_per_epoch=6,
        schedule=build(kind, optimizer, length), loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )  # fmt: skip


def build(kind: str, optimizer: torch.optim.Optimizer, length: int) -> Any:
    if kind == "multistep":
        return MultiStepLR(optimizer, [3, 9])
    if kind == "polynomial":
        return PolynomialLR(optimizer, length)
    if kind == "two":
        return [LambdaLR(optimizer, lambda step: 0.9**step), ReduceLROnPlateau(optimizer)]
    if kind == "sequential lambdas":
        return SequentialLR(
            optimizer,
            [LambdaLR(optimizer, lambda step: (step + 1) / 3), LambdaLR(optimizer, lambda step: 0.9**step)],
            [3],
        )
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, length)]
    return SequentialLR(optimizer, parts, [3]) if kind == "sequential" else ChainedScheduler(parts, optimizer)


KINDS = ["sequential", "chained", "sequential lambdas", "two", "multistep", "polynomial"]
STEPS, LAST = 5, 15


make = functools.partial(trainings.make, Path("nowhere"), f"{__name__}:scheduled")  # nothing is saved


def train_on_and_list_rates(training: Training) -> list[float]:
    """Train the remaining steps and return the rate of each."""
    rates = []
    while training.progress.step < LAST:
        rates.append(training.lrs[0])
        train_to(training, training.progress.step + 1)
    return rates


def take_over(kind: str, **changed: Any) -> tuple[list[str], list[float], list[float]]:
    """Return the names taken over after some steps, the rates from there, and a run's that always had the settings."""
    before, after, always = make(kind=kind), make(kind=kind, **changed), make(kind=kind, **changed)
    for training in (before, always):
        train_to(training, STEPS)
    saved = state.from_payload(state.to_payload(copy.deepcopy(capturing.capture(before))))
    capturing.restore(after, saved)
    names = merging.take_over(after, saved["built"])
    return names, train_on_and_list_rates(after), train_on_and_list_rates(always)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_settings_change_nothing(kind: str) -> None:
    names, found, expected = take_over(kind)
    assert names == []
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_rate_reaches_composed_schedulers(kind: str) -> None:
    names, found, expected = take_over(kind, lr=0.01)
    assert names
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_schedulers_report_the_rate_in_force(kind: str) -> None:
    after, always = make(kind=kind, lr=0.01), make(kind=kind, lr=0.01)
    train_to(before := make(kind=kind), STEPS)
    train_to(always, STEPS)
    saved = state.from_payload(state.to_payload(copy.deepcopy(capturing.capture(before))))
    capturing.restore(after, saved)
    merging.take_over(after, saved["built"])
    assert after.schedulers[0].get_last_lr() == after.lrs
    assert last_rates(after.schedulers) == pytest.approx(last_rates(always.schedulers))


def last_rates(schedulers: Any) -> list[float]:
    """Return the last rate that each scheduler reports, inner schedulers included."""
    found = []
    for scheduler in schedulers:
        found += [*scheduler.get_last_lr(), *last_rates(getattr(scheduler, "_schedulers", ()))]
    return found


@pytest.mark.parametrize("kind", ["sequential", "chained", "polynomial"])
def test_a_changed_length_reaches_composed_schedulers(kind: str) -> None:
    """The rate continues from its present value, in the shape of the new schedule."""
    names, found, expected = take_over(kind, length=40)
    assert names
    assert found == pytest.approx([found[0] / expected[0] * rate for rate in expected])
