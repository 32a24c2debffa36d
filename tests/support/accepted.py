"""Ordinary code that was once refused."""

import copy
import enum
import multiprocessing
import os
import signal
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from holdfast import Recipe, Run

PER_EPOCH = 6


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def begin(run: Run, **kept: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, **kept)
    return model, optimizer


def swaps(how: str = "back", probes: bool = False) -> Recipe:
    """Evaluate the average of the weights in the model's place, and put the model's own back, or forget it."""
    model = net()
    average = copy.deepcopy(model)

    def after_step() -> None:
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    def evaluate(model: nn.Module) -> dict[str, Any]:
        own = copy.deepcopy(model.state_dict())
        if how == "data":
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                weight.data = mean.data
        else:
            model.load_state_dict(average.state_dict())
        found = model(torch.ones(1, 4)).sum()
        if how == "back":
            model.load_state_dict(own)
        return {"found": found}

    return Recipe(
        model=model, data=list(torch.eye(4)), optimizer=torch.optim.AdamW(model.parameters(), 0.01), batch_size=2,
        loss=lambda model, x: model(x).square().mean(), after_step=after_step, steps_per_epoch=PER_EPOCH,
        evaluate=evaluate, probe=evaluate if probes else None, extras={"average": average},
    )  # fmt: skip


def logs_at_the_end(run: Run) -> None:
    """Log, and step a scheduler, at each epoch's end, after the inner loop.

    The variable STOP_IN is the number, from 0, of the step in which the rank is told to stop.
    """
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(DataLoader(TensorDataset(torch.eye(24)[:, :4]), 4, shuffle=True)):
        for number, (x,) in enumerate(run.batches(), 6 * epoch + run.batch_number):
            run.log(loss=learn(model, optimizer, x))
            if str(number) == os.environ.get("STOP_IN"):
                os.kill(os.getpid(), signal.SIGTERM)
        scheduler.step()
        run.log(held_out=epoch + 0.5, drawn=torch.rand(()))


def registers(run: Run) -> None:
    """Give accelerate a scheduler of the loop's own."""

    class Warmup:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    model, optimizer = begin(run)
    warmup = Warmup()
    run.accelerator.register_for_checkpointing(warmup)
    for _ in run.steps(per_epoch=PER_EPOCH):
        warmup.count += 1
        optimizer.param_groups[0]["lr"] = 0.01 * warmup.count
        learn(model, optimizer, torch.randn(8, 4))


class Slowing:
    """Steps an optimizer at a rate of its own, and saves it with its count."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / self.count
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.optimizer.load_state_dict(state["optimizer"])


class Looking(torch.optim.Optimizer):
    """Steps another optimizer, whose groups it has, and saves it with its count."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, **self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.optimizer.load_state_dict({name: state[name] for name in ("state", "param_groups")})
        self.param_groups = self.optimizer.param_groups


def keeps_a_wrapper_and_its_optimizer(run: Run, how: str) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    wrapper: Any = Looking(optimizer) if how == "optimizer" else Slowing(optimizer)
    run.keep(model=model, optimizer=optimizer, wrapper=wrapper)
    for _ in run.steps(per_epoch=PER_EPOCH):
        learn(model, wrapper, torch.randn(8, 4))


class Direction(enum.Enum):
    LEFT, RIGHT = range(2)


class Space:
    def __init__(self, size: int) -> None:
        self.size, self.np_random = size, np.random.default_rng(3)

    def sample(self) -> float:
        return float(self.np_random.random(self.size).sum())


class Inner:
    """An environment with a space, and an object that each reset makes anew."""

    def __init__(self) -> None:
        self.space, self.np_random, self.kind, self.facing = Space(3), np.random.default_rng(4), Space, Direction.LEFT
        self.reset()

    def reset(self) -> None:
        self.board = Space(1)
        self.place = self.np_random.random(4)

    def step(self, action: float) -> np.ndarray:
        self.place = self.place * 0.5 + action + self.board.sample()
        return self.place


class Wrapper:
    def __init__(self, env: Any) -> None:
        self.env, self._steps = env, 0

    def step(self) -> Tensor:
        self._steps += 1
        if self._steps % 5 == 0:
            self.env.reset()
        return torch.tensor(self.env.step(self.env.space.sample()), dtype=torch.float32)[None]


def acts_in_a_wrapped_environment(run: Run, how: str = "") -> None:
    env = Wrapper(Inner())
    if how == "unreadable":
        env.data = iter([1])  # type: ignore[attr-defined]
    if how == "elsewhere":
        env.data = multiprocessing.SimpleQueue()  # type: ignore[attr-defined]
    model, optimizer = begin(run, env=vars(env))
    for step in run.steps(per_epoch=PER_EPOCH):
        x = env.step()
        if how == "turns" and step.number == 2:
            env.env.facing = Direction.RIGHT
        if how == "grows" and step.number == 2:
            env.env.second = Space(1)
        if how == "unseeded" and step.number == 2:
            env.env.second_random = np.random.default_rng()
        learn(model, optimizer, x)


class Late:
    """An environment that gets its generator at its first reset, and notes how long each episode has taken."""

    def __init__(self) -> None:
        self.np_random: np.random.Generator | None = None
        self.began, self.count, self.infos = 0.0, 0, deque[dict[str, Any]](maxlen=2)

    def step(self) -> Tensor:
        if self.np_random is None:
            self.np_random, self.began = np.random.default_rng(5), time.time()
        self.count += 1
        if self.count % 3 == 0:
            length = round(time.time() - self.began, 6)
            self.infos.append({"length": self.count, "t": length})
        return torch.tensor(self.np_random.normal(size=(1, 4)), dtype=torch.float32)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.optimizer = torch.optim.AdamW(self.body.parameters(), lr=0.01)


class NoteLogger:
    def __init__(self) -> None:
        self.lines = [time.time()]


class Algorithm:
    """An algorithm in the shape of stable-baselines3: it has a policy with its optimizer, an environment, a logger."""

    def __init__(self) -> None:
        self.env, self.policy, self.space = Late(), Policy(), Space(2)
        self.space.np_random = np.random.default_rng()  # nothing draws from it
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.alpha_optimizer, self.critic = torch.optim.Adam([self.log_alpha], lr=0.1), self.policy.body

    def learn(self) -> Tensor:
        self.logger = NoteLogger()
        loss = learn(self.policy.body, self.policy.optimizer, self.env.step() * self.log_alpha.detach().exp())
        self.alpha_optimizer.zero_grad()
        (self.log_alpha.square() + self.log_alpha * loss.detach()).backward()  # type: ignore[no-untyped-call]
        self.alpha_optimizer.step()
        return loss


def keeps_an_algorithm(run: Run) -> None:
    algorithm = Algorithm()
    run.keep(algorithm=algorithm)
    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=algorithm.learn())


def draws_without_end(run: Run, samples: int = 10**10, workers: int = 0) -> None:
    """minGPT's Trainer has a sampler that draws 10 billion samples."""
    data = TensorDataset(torch.linspace(-1, 1, 88).view(22, 4))
    sampler = RandomSampler(data, replacement=True, num_samples=samples)
    model, optimizer = begin(run)
    for step in run.steps(DataLoader(data, 4, sampler=sampler), per_epoch=PER_EPOCH):
        (x,) = step.batch
        step.log(loss=learn(model, optimizer, x * torch.rand(())))
