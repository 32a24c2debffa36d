"""State in plain objects and containers, which a loop changes and doesn't keep."""

import dataclasses
import enum
import heapq
import queue
import threading
import types
import weakref
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast import Recipe, Run
from tests.programs.network import PER_EPOCH, Batch, begin, draw, fit, grow, learn, make


@dataclasses.dataclass
class Ticks:
    ticks: int = 0


def dataclass_object(run: Run, after: int) -> None:
    """Count in an object of a dataclass, in a function that the loop calls."""
    model, optimizer = begin(run)
    state = Ticks()

    def tick() -> int:
        state.ticks += 1
        return state.ticks

    for step in run.steps(per_epoch=PER_EPOCH):
        step.log(loss=learn(fit(model, draw()) * grow(tick(), after), optimizer))


class Bare:
    pass


def bare_object(run: Run, after: int) -> None:
    """Count in an object of an empty class."""
    model, optimizer = begin(run)
    state: Any = Bare()
    state.ticks = 0
    for step in run.steps(per_epoch=PER_EPOCH):
        state.ticks += 1
        step.log(loss=learn(fit(model, draw()) * grow(state.ticks, after), optimizer))


def namespace(after: int) -> Recipe:
    """Count in a SimpleNamespace."""
    state = types.SimpleNamespace(calls=0)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        state.calls += 1
        return fit(model, batch) * grow(state.calls, after)

    return make(loss)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def slots(run: Run, after: int) -> None:
    """Count in an object with __slots__."""
    model, optimizer = begin(run)
    state = Slotted()
    for step in run.steps(per_epoch=PER_EPOCH):
        state.count += 1
        step.log(loss=learn(fit(model, draw()) * grow(state.count, after), optimizer))


class Level:
    """Has its number behind a property."""

    def __init__(self) -> None:
        self.__level = 0

    @property
    def level(self) -> int:
        return self.__level

    @level.setter
    def level(self, value: int) -> None:
        self.__level = value


def property_of_a_private_number(after: int) -> Recipe:
    """Count in a private attribute that a property returns."""
    level = Level()

    def climb() -> None:
        level.level += 1

    return make(lambda model, batch: fit(model, batch) * grow(level.level, after), after_step=climb)


class Scores(dict[str, float]):
    """A dict with an attribute that counts."""

    updates = 0

    def __setitem__(self, name: str, value: float) -> None:
        self.updates += 1
        super().__setitem__(name, value)


def dict_with_an_attribute(run: Run, after: int) -> None:
    """Count in an attribute of a dict; only the dict's items are kept."""
    scores = Scores(loss=0.0)
    model, optimizer = begin(run, scores=scores)
    for step in run.steps(per_epoch=PER_EPOCH):
        scores["loss"] = float(step.number)
        step.log(loss=learn(fit(model, draw()) * grow(scores.updates, after), optimizer))


def queue_object(run: Run, after: int) -> None:
    """Put batches into a queue, and train on them some steps later."""
    model, optimizer = begin(run)
    waiting: queue.Queue[Batch] = queue.Queue()
    for step in run.steps(per_epoch=PER_EPOCH):
        batch = draw()
        if step.number >= after:
            waiting.put(batch)
        if waiting.qsize() > 3:
            batch = waiting.get()
        step.log(loss=learn(fit(model, batch), optimizer))


def deque_of_losses(run: Run, after: int) -> None:
    """Weight the loss by the mean of the last losses."""
    model, optimizer = begin(run)
    recent: deque[float] = deque(maxlen=5)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = fit(model, draw())
        recent.append(loss.item())
        scale = 1 / (1 + sum(recent) / len(recent)) if step.number >= after else 1.0
        step.log(loss=learn(loss * scale, optimizer))


def heap(run: Run, after: int) -> None:
    """Keep the samples with the largest losses in a heap, and train on them again."""
    model, optimizer = begin(run)
    hardest: list[tuple[float, int, Batch]] = []
    for step in run.steps(per_epoch=PER_EPOCH):
        batch = draw()
        heapq.heappush(hardest, (-fit(model, batch).item(), step.number, batch))
        if step.number >= after:
            batch = heapq.heappop(hardest)[2]
        step.log(loss=learn(fit(model, batch), optimizer))


def weak_dictionary(run: Run, after: int) -> None:
    """Count in a WeakKeyDictionary of modules."""
    model, optimizer = begin(run)
    calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
    for step in run.steps(per_epoch=PER_EPOCH):
        calls[model] = calls.get(model, 0) + 1
        step.log(loss=learn(fit(model, draw()) * grow(calls[model], after), optimizer))


def thread(run: Run, after: int) -> None:
    """Count in a thread that lives as long as the process."""
    model, optimizer = begin(run)
    asked: queue.Queue[int] = queue.Queue()
    answered: queue.Queue[float] = queue.Queue()

    def count() -> None:
        number = 0
        while True:
            asked.get()
            number += 1
            answered.put(grow(number, after))

    threading.Thread(target=count, daemon=True).start()
    for step in run.steps(per_epoch=PER_EPOCH):
        asked.put(step.number)
        step.log(loss=learn(fit(model, draw()) * answered.get(), optimizer))


def thread_local(run: Run, after: int) -> None:
    """Count in a threading.local."""
    model, optimizer = begin(run)
    own = threading.local()
    for step in run.steps(per_epoch=PER_EPOCH):
        own.count = getattr(own, "count", 0) + 1
        step.log(loss=learn(fit(model, draw()) * grow(own.count, after), optimizer))


def text(run: Run, after: int) -> None:
    """Append to a string in each step; its length and end change the loss."""
    model, optimizer = begin(run)
    prompt = ""
    for step in run.steps(per_epoch=PER_EPOCH):
        prompt += chr(97 + step.number % 26)
        weight = grow(len(prompt) - ord(prompt[-1]) / 1000, after)
        step.log(loss=learn(fit(model, draw()) * weight, optimizer))


def raw_bytes(after: int) -> Recipe:
    """Count in a bytearray."""
    seen = bytearray()

    def see() -> None:
        seen.append(len(seen) % 256)

    return make(lambda model, batch: fit(model, batch) * grow(len(seen), after), after_step=see)


def numpy_scalar(run: Run, after: int) -> None:
    """Weight the loss by the best loss so far, a NumPy scalar."""
    model, optimizer = begin(run)
    best = np.float32(100)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = fit(model, draw())
        best = np.minimum(best, np.float32(loss.item()))
        step.log(loss=learn(loss * (1 / (1 + float(best)) if step.number >= after else 1.0), optimizer))


def tensors_of_a_tuple(run: Run, after: int) -> None:
    """Carry a hidden state from step to step, in a tuple."""
    torch.manual_seed(1)
    rnn = nn.LSTM(8, 1)
    model, optimizer = begin(run, rnn)
    hidden = (torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        started = hidden if step.number >= after else (torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
        out, left = model(x[:, None], started)
        hidden = (left[0].detach(), left[1].detach())
        step.log(loss=learn((out[:, 0] - y).square().mean(), optimizer))


class Phase(enum.Enum):
    WARM_UP = "warm up"
    MAIN = "main"


def phase(after: int) -> Recipe:
    """Enter another phase of training after some steps, and keep the phase as a member of an enum."""
    state = {"phase": Phase.WARM_UP, "left": after}

    def follow() -> None:
        state["left"] -= 1  # type: ignore[operator]
        if not state["left"]:
            state["phase"] = Phase.MAIN

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return fit(model, batch) * (1.5 if state["phase"] is Phase.MAIN else 1.0)

    return make(loss, after_step=follow)


def set_of_seen(run: Run, after: int) -> None:
    """Weight samples by whether they are in a set of seen samples."""
    model, optimizer = begin(run)
    seen: set[int] = set()
    for step in run.steps(per_epoch=PER_EPOCH):
        number = step.number * 7 % 5
        is_new = number not in seen
        seen.add(number)
        step.log(loss=learn(fit(model, draw()) * (1.5 if is_new and step.number >= after else 1.0), optimizer))


def counter_of_visits(run: Run, after: int) -> None:
    """Weight the loss by how often a state was visited, as curiosity does."""
    model, optimizer = begin(run)
    visits: Counter[int] = Counter()
    for step in run.steps(per_epoch=PER_EPOCH):
        visits[step.number % 3] += 1
        bonus = 1 / visits[step.number % 3] ** 0.5 if step.number >= after else 0.0
        step.log(loss=learn(fit(model, draw()) * (1 + bonus), optimizer))


def least_recently_used(run: Run, after: int) -> None:
    """Take targets out of an OrderedDict whose oldest item is dropped."""
    model, optimizer = begin(run)
    cache: OrderedDict[int, Batch] = OrderedDict()
    for step in run.steps(per_epoch=PER_EPOCH):
        cache[step.number] = draw()
        if len(cache) > 6:
            cache.popitem(last=False)
        batch = next(iter(cache.values())) if step.number >= after else cache[step.number]
        step.log(loss=learn(fit(model, batch), optimizer))
