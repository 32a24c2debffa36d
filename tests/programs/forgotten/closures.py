"""State in functions: closures, defaults, decorators, generators and iterators."""

import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import Recipe, Run
from tests.programs.network import PER_EPOCH, Batch, Clock, begin, draw, fit, grow, learn, make, net


def after_step(after: int) -> Recipe:
    """Count in a closure of after_step, which changes the weights."""
    model, seen = net(), [0]

    def shrink() -> None:
        seen[0] += 1
        if seen[0] > after:
            with torch.no_grad():
                model[0].weight.mul_(0.999)

    return make(model=model, after_step=shrink)


def nonlocal_number(run: Run, after: int) -> None:
    """Count in a variable of an outer function."""
    model, optimizer = begin(run)
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return count

    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()) * grow(tick(), after), optimizer))


def mutable_default(after: int) -> Recipe:
    """Count in the default value of an argument."""

    def loss(model: nn.Module, batch: Batch, seen: list[int] = [0]) -> Tensor:  # noqa: B006
        seen[0] += 1
        return fit(model, batch) * grow(seen[0], after)

    return make(loss)


def _remembering(model: nn.Module, batch: Batch, *, memory: dict[str, int], after: int) -> Tensor:
    memory["calls"] = memory.get("calls", 0) + 1
    return fit(model, batch) * grow(memory["calls"], after)


def bound_argument(after: int) -> Recipe:
    """Count in an argument that functools.partial has bound."""
    return make(functools.partial(_remembering, memory={}, after=after))


def counted(function: Callable[..., Tensor], after: int) -> Callable[..., Tensor]:
    """Return a function that counts its calls in its own attribute."""

    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Tensor:
        wrapper.calls += 1  # type: ignore[attr-defined]
        return function(*arguments) * grow(wrapper.calls, after)  # type: ignore[attr-defined]

    wrapper.calls = 0  # type: ignore[attr-defined]
    return wrapper


def decorator(after: int) -> Recipe:
    """Count in an attribute of a decorated function."""
    return make(counted(fit, after))


def _heats(after: int) -> Iterator[float]:
    count = 0
    while True:
        count += 1
        yield grow(count, after)


def generator_function(run: Run, after: int) -> None:
    """Take a temperature for each step from a generator function."""
    model, optimizer = begin(run)
    heats = _heats(after)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()) * next(heats), optimizer))


def counting_iterator(run: Run, after: int) -> None:
    """Count with itertools.count."""
    model, optimizer = begin(run)
    numbers = itertools.count(1)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()) * grow(next(numbers), after), optimizer))


def list_iterator(after: int) -> Recipe:
    """Take a weight for each step from an iterator over a list."""
    model = net()
    decays = iter([1.0] * after + [0.999] * 10_000)

    def decay() -> None:
        factor = next(decays)
        with torch.no_grad():
            model[2].weight.mul_(factor)

    return make(model=model, after_step=decay)


def cached_function(run: Run, after: int) -> None:
    """Keep in functools.lru_cache the first loss after some steps."""
    model, optimizer = begin(run)

    @functools.lru_cache
    def baseline() -> float:
        return fit(model, draw()).item()

    for step in run.steps(per_epoch=PER_EPOCH):
        scale = 1 / (1 + baseline()) if step.number >= after else 1.0
        step.log(loss=learn(fit(model, draw()) * scale, optimizer))


LEVEL: contextvars.ContextVar[int] = contextvars.ContextVar("level", default=0)


def context_variable(run: Run, after: int) -> None:
    """Count in a context variable."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        LEVEL.set(LEVEL.get() + 1)
        step.log(loss=learn(fit(model, draw()) * grow(LEVEL.get(), after), optimizer))


class Judge:
    """A loss with a memory of its own."""

    def __init__(self, after: int) -> None:
        self.after, self.calls = after, 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.calls += 1
        return fit(model, batch) * grow(self.calls, self.after)


def callable_object(after: int) -> Recipe:
    """Count in an attribute of the callable object that is the loss."""
    return make(Judge(after))


def composed_closures(after: int) -> Recipe:
    """Replace a function in a closure once, at a step that a registered counter gives."""
    clock, scale = Clock(), [lambda loss: loss]

    def follow() -> None:
        clock.tick()
        if clock.steps == after:
            scale.append(lambda loss: loss * 1.5)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return scale[-1](fit(model, batch))

    return make(loss, after_step=follow, extras={"clock": clock})
