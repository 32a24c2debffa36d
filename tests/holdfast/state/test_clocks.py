"""Readings of clocks and the durations between them are left out of the state of a kept dict or object."""

import threading
import time
import types
from collections import deque
from typing import Any

import pytest
import torch

from holdfast.errors import RecipeError
from holdfast.state import as_stateful
from holdfast.state.clocks import list_measured


class Timed:
    """Counts its steps and records their durations, as an environment's wrapper does."""

    def __init__(self) -> None:
        self.position, self.steps, self.time = torch.zeros(2), 0, 0.0
        self.began = read()
        self.time_queue: deque[float] = deque(maxlen=10)

    def step(self) -> None:
        self.time_queue.append(time.perf_counter() - self.began)
        self.began = read()
        self.move()

    def move(self) -> None:
        self.steps += 1
        self.position += 1
        self.time += 0.02  # the simulation's time, which is state


def read() -> float:
    """Return a reading that is no whole number of milliseconds, as all but one in a million are."""
    while round(found := time.perf_counter(), 3) == found:
        pass
    return found


class Outer:
    def __init__(self) -> None:
        self.env = Timed()

    def step(self) -> None:
        self.env.step()


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("make", [Timed, Outer])
def test_a_kept_object_comes_back_without_its_clocks(make: Any, is_whole: bool) -> None:
    lived, again = make(), make()
    kept, other = (as_stateful("env", each if is_whole else vars(each)) for each in (lived, again))
    for _ in range(3):
        lived.step()
    state = kept.state_dict()
    assert "began" not in str(state)
    assert "time_queue" not in str(state)
    inner = again if make is Timed else again.env
    began = inner.began
    other.load_state_dict(state)
    assert (inner.steps, inner.time, inner.position.tolist()) == (3, 0.06, [3.0, 3.0])
    assert (inner.began, len(inner.time_queue)) == (began, 0)


def test_the_time_of_a_simulation_is_state() -> None:
    timed = Timed()
    assert list_measured(vars(timed)) == {"began", "time_queue"}
    assert list_measured({"time": 0.5, "began": 3.0}) == set()


def test_the_part_that_stands_in_the_way_is_named() -> None:
    lock = types.SimpleNamespace(lock=threading.Lock())
    with pytest.raises(RecipeError, match=r"the state of env\.lock, a _thread\.lock, can't be read") as caught:
        as_stateful("env", lock)
    assert caught.value.hint.startswith('if no later step needs it: run.keep(env=env, leave_out=("lock",))')
    assert as_stateful("env", lock, leave_out=("lock",)).state_dict() == {}
