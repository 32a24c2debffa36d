"""State in and around optimizers: counts, rates, accumulated gradients, running losses."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from holdfast import Recipe, Run
from tests.programs.network import PER_EPOCH, Batch, Clock, begin, draw, fit, grow, learn, make, net


class Counting(torch.optim.AdamW):
    """Counts its steps in an attribute, and steps less and less far."""

    def __init__(self, parameters: Any, after: int, name: str) -> None:
        super().__init__(parameters, lr=0.01)
        self.after, self.name = after, name
        setattr(self, name, 0)

    def step(self, closure: Any = None) -> Any:
        setattr(self, self.name, getattr(self, self.name) + 1)
        for group in self.param_groups:
            group["lr"] = 0.01 / grow(getattr(self, self.name), self.after)
        return super().step(closure)


def private_number_of_an_optimizer(run: Run, after: int) -> None:
    """Count in a private attribute of a kept optimizer."""
    model = net()
    optimizer = Counting(model.parameters(), after, "_steps")
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))


def public_number_of_an_optimizer(run: Run, after: int) -> None:
    """Count in a public attribute of a kept optimizer."""
    model = net()
    optimizer = Counting(model.parameters(), after, "steps")
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))


def number_of_a_recipes_optimizer(after: int) -> Recipe:
    """Count in an attribute of a recipe's optimizer."""
    model = net()
    return make(model=model, optimizer=Counting(model.parameters(), after, "steps"))


def state_that_is_added(run: Run, after: int) -> None:
    """Add a value to the optimizer's state in a step."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = learn(fit(model, draw()), optimizer)
        if step.number >= after:
            mean = optimizer.state[model[0].weight].setdefault("mean", torch.zeros_like(model[0].weight))
            mean.lerp_(model[0].weight.detach(), 0.1)
            model[0].weight.data.lerp_(mean, 0.01)
        step.log(loss=loss)


def step_hook(after: int) -> Recipe:
    """Count in a hook that runs after each step of the optimizer."""
    model, steps = net(), [0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def shrink(*_: Any) -> None:
        steps[0] += 1
        if steps[0] > after:
            with torch.no_grad():
                model[2].weight.mul_(0.999)

    optimizer.register_step_post_hook(shrink)
    return make(model=model, optimizer=optimizer)


def momentum_in_a_dict(run: Run, after: int) -> None:
    """Train with a custom SGD, whose momentum is in a dict."""
    model = net()
    run.keep(model=model)
    momentum = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for step in run.steps(per_epoch=PER_EPOCH):
        model.zero_grad()
        loss = learn(fit(model, draw()))
        with torch.no_grad():
            for name, each in model.named_parameters():
                momentum[name].mul_(0.9).add_(each.grad)  # type: ignore[arg-type]
                each.sub_(momentum[name] if step.number >= after else each.grad, alpha=0.01)  # type: ignore[arg-type]
        step.log(loss=loss)


def rate_lowered_by_patience(after: int) -> Recipe:
    """Lower the learning rate by hand after a number of steps without progress."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bad = [0]

    def follow() -> None:
        bad[0] += 1
        if bad[0] > after:
            optimizer.param_groups[0]["lr"] *= 0.99

    return make(model=model, optimizer=optimizer, after_step=follow)


def accumulated_steps(run: Run, after: int) -> None:
    """Count micro-batches, and after some of them step the optimizer only at every third."""
    model, optimizer = begin(run)
    micro = 0
    for step in run.steps(per_epoch=PER_EPOCH):
        micro, loss = micro + 1, fit(model, draw())
        loss.backward()  # type: ignore[no-untyped-call]
        if micro <= after or micro % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        step.log(loss=loss)


def loss_scale(run: Run, after: int) -> None:
    """Scale the loss by a number that grows after every few steps."""
    model, optimizer = begin(run)
    scale, good = 1.0, 0
    for step in run.steps(per_epoch=PER_EPOCH):
        good += 1
        if good > after:
            scale, good = scale * 1.5, 0
        step.log(loss=learn(fit(model, draw()) * scale, optimizer))


def running_loss(after: int) -> Recipe:
    """Divide the loss by its running mean."""
    clock, mean = Clock(), [1.0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = fit(model, batch)
        if model.training:
            mean[0] = 0.9 * mean[0] + 0.1 * found.item()
        return found / (mean[0] if clock.steps >= after else 1.0)

    return make(loss, after_step=clock.tick, extras={"clock": clock})


def optimizer_of_a_second_head(after: int) -> Recipe:
    """Step an optimizer inside the loss function."""
    model, head, clock = net(), nn.Linear(8, 1), Clock()
    optimizer = torch.optim.Adam(head.parameters(), 0.05)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            learn(F.mse_loss(head(batch[0]), batch[1]), optimizer)
        return fit(model, batch) + 0.1 * (clock.steps >= after) * head(batch[0]).detach().mean() * fit(model, batch)

    return make(loss, model, after_step=clock.tick, extras={"head": head, "clock": clock})


def scheduler(run: Run, after: int) -> None:
    """Step a scheduler that isn't kept."""
    model, optimizer = begin(run)
    schedule = LambdaLR(optimizer, lambda step: 1 / grow(step, after))
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))
        schedule.step()


def average_of_weights(run: Run, after: int) -> None:
    """Pull the weights towards an AveragedModel that isn't kept."""
    model, optimizer = begin(run)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in run.steps(per_epoch=PER_EPOCH):
        average.update_parameters(model)
        x, y = draw()
        pull = F.mse_loss(model(x), average(x).detach()) if step.number >= after else 0.0
        step.log(loss=learn(F.mse_loss(model(x), y) + pull, optimizer))
