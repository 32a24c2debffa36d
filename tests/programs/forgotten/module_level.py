"""State of modules and classes: globals, class attributes, singletons, replaced functions."""

import random
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast import Recipe, Run
from tests.programs.forgotten import registry
from tests.programs.network import PER_EPOCH, Batch, Clock, begin, draw, fit, grow, learn, make

calls = 0
RANDOM = random.Random(3)
NOISE = np.random.default_rng(3)


def global_number(after: int) -> Recipe:
    """Count the calls of the loss function in a global variable."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        global calls
        calls += 1
        return fit(model, batch) * grow(calls, after)

    return make(loss)


class Meter:
    seen: ClassVar[int] = 0

    @classmethod
    def see(cls) -> int:
        cls.seen += 1
        return cls.seen


def class_attribute(run: Run, after: int) -> None:
    """Count in an attribute of a class."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()) * grow(Meter.see(), after), optimizer))


def class_attribute_of_a_loss(after: int) -> Recipe:
    """Count in an attribute of the loss's class."""

    class Loss(nn.Module):
        calls = 0

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            type(self).calls += 1
            return fit(model, batch) * grow(type(self).calls, after)

    return make(Loss())


def singleton(run: Run, after: int) -> None:
    """Count in an object of another module."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        registry.STATE.steps += 1
        step.log(loss=learn(fit(model, draw()) * grow(registry.STATE.steps, after), optimizer))


def another_modules_global(after: int) -> Recipe:
    """Count in a global variable of another module."""

    def count() -> None:
        registry.CALLS += 1

    return make(lambda model, batch: fit(model, batch) * grow(registry.CALLS, after), after_step=count)


def replaced_function(run: Run, after: int) -> None:
    """Replace a function of another module once."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            registry.scale = lambda loss: loss * 1.5
        step.log(loss=learn(registry.scale(fit(model, draw())), optimizer))


def replaced_library_function(after: int) -> Recipe:
    """Replace a function of torch once."""
    clock, right = Clock(), F.mse_loss

    def follow() -> None:
        clock.tick()
        if clock.steps == after:
            F.mse_loss = lambda *arguments: right(*arguments) * 1.5

    return make(after_step=follow, extras={"clock": clock})


def global_random(run: Run, after: int) -> None:
    """Draw from a random.Random in a global variable."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        drawn = RANDOM.random()
        step.log(loss=learn(fit(model, draw()) * (1 + drawn * (step.number >= after)), optimizer))


def global_numpy_generator(after: int) -> Recipe:
    """Draw from a NumPy generator in a global variable."""
    clock = Clock()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return fit(model, batch) * (1 + float(NOISE.random()) * (clock.steps >= after))

    return make(loss, after_step=clock.tick, extras={"clock": clock}, probe=_probe)


def _probe(model: nn.Module) -> Any:
    return {"output": model(torch.ones(2, 8))}


class Borg:
    """All its objects share their attributes."""

    shared: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.__dict__ = self.shared


def shared_attributes(run: Run, after: int) -> None:
    """Count in attributes that all objects of a class share."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        borg = Borg()
        borg.count = getattr(borg, "count", 0) + 1
        step.log(loss=learn(fit(model, draw()) * grow(borg.count, after), optimizer))
