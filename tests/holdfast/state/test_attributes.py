"""The state of an object that keeps it in plain attributes."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.state import from_payload, to_payload
from holdfast.state.attributes import Attributes, is_plain


def is_time(name: str) -> bool:
    return name.endswith("_runtime")


class Thing:
    """An object with state, settings, and a bar that is no state."""

    def __init__(self, limit: int = 3) -> None:
        self.limit, self.count, self.bar = limit, 0, None
        self.logs: list[dict[str, float]] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.weights, self.scores = torch.zeros(2), np.zeros(2)
        self.random = random.Random(1)
        self.sums = {"all": 0}
        self.pairs = [([0.5], {"n": 0}, random.Random(2))]

    def work(self) -> float:
        self.count += 1
        self.bar = object()  # type: ignore[assignment]
        self.logs.append({"loss": 1.5, "eval_runtime": random.SystemRandom().random()})
        self.recent.append(self.count)
        self.weights += 1
        self.scores[0] += 1
        self.sums["all"] += self.count
        (numbers, counts, own), *_ = self.pairs
        numbers.append(own.random())
        counts["n"] += 1
        self.last_runtime, self.late = random.SystemRandom().random(), {"best": self.count}
        return self.random.random()


def passed_on(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a checkpoint gives it back."""
    return from_payload(to_payload({"state": state}))["state"]  # type: ignore[no-any-return]


def test_an_object_goes_on_as_it_was() -> None:
    one, other = Thing(), Thing(limit=5)
    held, restored = Attributes(lambda: one, is_time), Attributes(lambda: other, is_time)
    one.work()
    one.work()
    logs, recent = other.logs, other.recent
    restored.load_state_dict(passed_on(held.state_dict()))
    assert (other.count, other.sums, other.late) == (2, {"all": 3}, {"best": 2})
    assert other.logs is logs
    assert logs == [{"loss": 1.5}] * 2
    assert other.recent is recent
    assert recent == deque([1, 2], maxlen=2)
    assert other.pairs[0][:2] == one.pairs[0][:2]
    assert len(other.pairs[0][0]) == 3
    assert other.weights.tolist() == [2, 2]
    assert other.scores.tolist() == [2, 0]
    assert (other.limit, other.bar) == (5, None), "settings and objects are the new ones"
    assert other.work() == one.work()
    assert to_payload(restored.state_dict()).tree == to_payload(held.state_dict()).tree


def test_what_has_changed_since_is_as_built_again() -> None:
    thing = Thing()
    held = Attributes(lambda: thing, is_time)
    state = passed_on(held.state_dict())
    thing.work()
    held.load_state_dict(state)
    assert (thing.count, thing.logs, thing.sums) == (0, [], {"all": 0})
    assert not thing.weights.any()


def test_only_what_has_changed_is_saved() -> None:
    thing = Thing()
    assert Attributes(lambda: thing, is_time).state_dict().keys() == {"random", "pairs"}


@pytest.mark.parametrize(
    "value", [1, "a", None, [1, {"a": (1, 2.0)}], torch.ones(1), np.ones(1), random.Random(1), ([1],)]
)
def test_plain_values(value: Any) -> None:
    assert is_plain(value)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, CIRCLE, {(1, 2): 3}, SimpleNamespace(), ([{1}],), np.array([object()]), lambda: None]
)
def test_values_that_are_not_plain(value: Any) -> None:
    assert not is_plain(value)


def test_a_container_that_was_replaced_by_an_equal_one_is_new_after_a_restore_too() -> None:
    one, other = Thing(), Thing()
    held, restored = Attributes(lambda: one, is_time), Attributes(lambda: other, is_time)
    one.weights, one.logs = torch.zeros(2), []
    one.sums["all"] = 0
    assert {*held.state_dict()} == {"weights", "logs", "random", "pairs"}
    restored.load_state_dict(passed_on(held.state_dict()))
    for each in (one, other):
        each.weights += 1
        each.logs.append({"loss": 1.5})
    assert str(held.state_dict()) == str(restored.state_dict())
