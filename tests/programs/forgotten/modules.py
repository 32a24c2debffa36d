"""State in and around modules: buffers, attributes, hooks, averages, teachers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast import Recipe, Run
from tests.programs.network import PER_EPOCH, Batch, Clock, begin, draw, fit, grow, learn, make, net


class Layer(nn.Module):
    """A linear layer that scales its output by what a subclass counts."""

    def __init__(self, after: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.after = nn.Linear(8, 1), after

    def count(self) -> float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out * grow(self.count(), self.after) if self.training else out


class Buffered(Layer):
    def __init__(self, after: int) -> None:
        super().__init__(after)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def count(self) -> float:
        self.calls += 1  # type: ignore[operator]
        return float(self.calls)  # type: ignore[arg-type]


def buffer_that_is_not_persistent(after: int) -> Recipe:
    """Count in a buffer with persistent=False."""
    return make(model=Buffered(after))


def buffer_that_is_not_persistent_in_a_loop(run: Run, after: int) -> None:
    """Count in a buffer with persistent=False of a kept module."""
    model, optimizer = begin(run, Buffered(after))
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))


class Public(Layer):
    calls = 0

    def count(self) -> float:
        self.calls += 1
        return self.calls


def public_number(after: int) -> Recipe:
    """Count in a public attribute of the model."""
    return make(model=Public(after))


def public_number_in_a_loop(run: Run, after: int) -> None:
    """Count in a public attribute of a kept module."""
    model, optimizer = begin(run, Public(after))
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))


class Private(Layer):
    def __init__(self, after: int) -> None:
        super().__init__(after)
        self._calls = 0

    def count(self) -> float:
        self._calls += 1
        return self._calls


def private_number(run: Run, after: int) -> None:
    """Count in a private attribute of a kept module."""
    model, optimizer = begin(run, Private(after))
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))


class Carrying(Layer):
    def __init__(self, after: int) -> None:
        super().__init__(after)
        self.seen: Tensor | None = None

    def count(self) -> float:
        self.seen = torch.zeros(()) if self.seen is None else self.seen + 1
        return float(self.seen)


def tensor_of_a_module(run: Run, after: int) -> None:
    """Count in a tensor that is an attribute of a kept module but not a buffer."""
    model, optimizer = begin(run, Carrying(after))
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))


class Normed(nn.Module):
    """Divides by the size of its weights when that was first asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 1)
        self._cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor, is_divided: bool = False) -> Tensor:
        if is_divided and "norm" not in self._cache:
            self._cache["norm"] = self.linear.weight.detach().norm()
        return self.linear(x) / self._cache["norm"] if is_divided else self.linear(x)  # type: ignore[no-any-return]


def cached_norm(run: Run, after: int) -> None:
    """Compute a norm of the weights once, and keep it in a private dict of the module."""
    model, optimizer = begin(run, Normed())
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        step.log(loss=learn(F.mse_loss(model(x, step.number >= after), y), optimizer))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(8, 6)
        self.heads = [nn.Linear(6, 1), nn.Linear(6, 1)]  # no nn.ModuleList
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.body(x)) + self.heads[1](self.body(x))  # type: ignore[no-any-return]


def modules_in_a_list(after: int) -> Recipe:
    """Train modules that are in a plain list of the model."""
    model, clock = Headed(), Clock()
    heads = [each for head in model.heads for each in head.parameters()]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        for each in heads:
            each.requires_grad_(clock.steps >= after)
        return fit(model, batch)

    optimizer = torch.optim.SGD([*model.parameters(), *heads], 0.05)
    return make(loss, model, optimizer=optimizer, after_step=clock.tick, extras={"clock": clock})


def forward_hook(after: int) -> Recipe:
    """Add a hook to the forward pass once."""
    model, clock = net(), Clock()

    def follow() -> None:
        clock.tick()
        if clock.steps == after:
            model[0].register_forward_hook(lambda module, given, out: out * 1.1)

    return make(model=model, after_step=follow, extras={"clock": clock})


def hook_that_counts(run: Run, after: int) -> None:
    """Count in a hook of the forward pass that was added before the loop."""
    model, optimizer = begin(run)
    calls = [0]

    def scale(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        calls[0] += 1
        return out * grow(calls[0], after)

    model[0].register_forward_hook(scale)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))


def gradient_hook(run: Run, after: int) -> None:
    """Add a hook to a weight's gradient once."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        step.log(loss=learn(fit(model, draw()), optimizer))


def average_in_a_dict(after: int) -> Recipe:
    """Pull the weights towards their average, which is a dict of tensors."""
    model, clock = net(), Clock()
    mean = {name: each.detach().clone() for name, each in model.named_parameters()}

    def follow() -> None:
        clock.tick()
        for name, each in model.named_parameters():
            mean[name].lerp_(each.detach(), 0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        pull = sum((each - mean[name]).square().sum() for name, each in model.named_parameters())
        return fit(model, batch) + 0.1 * (clock.steps >= after) * pull

    return make(loss, model, after_step=follow, extras={"clock": clock})


def teacher_that_follows_rarely(run: Run, after: int) -> None:
    """Copy the weights into a teacher that isn't kept, in one step."""
    model, optimizer = begin(run)
    teacher = copy.deepcopy(model).requires_grad_(False)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.data = other.data.clone()
        x, y = draw()
        loss = F.mse_loss(model(x), y)
        if step.number >= after:
            loss = loss + F.mse_loss(model(x), teacher(x))
        step.log(loss=learn(loss, optimizer))


def frozen_by_a_count(after: int) -> Recipe:
    """Freeze a layer of a recipe's model at a step that an unregistered counter gives."""
    model, left = net(), [after]

    def follow() -> None:
        left[0] -= 1
        if left[0] == 0:
            model[0].requires_grad_(False)

    return make(model=model, after_step=follow)


def dropout_rate(after: int) -> Recipe:
    """Raise a dropout rate of a recipe's model once."""
    torch.manual_seed(1)
    model, clock = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)), Clock()

    def follow() -> None:
        clock.tick()
        if clock.steps == after:
            model[1].p = 0.5  # type: ignore[assignment]

    return make(model=model, after_step=follow, extras={"clock": clock})


def temperature(run: Run, after: int) -> None:
    """Change a public attribute of a kept module."""
    model, optimizer = begin(run, Public(10**9))
    model.temperature = 1.0
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number >= after:
            model.temperature *= 0.99
        step.log(loss=learn(fit(model, draw()) / model.temperature, optimizer))


def layer_that_is_added(run: Run, after: int) -> None:
    """Add a layer to the model in a step."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            model.append(nn.Linear(1, 1))
            optimizer.add_param_group({"params": model[3].parameters()})
        step.log(loss=learn(fit(model, draw()), optimizer))
