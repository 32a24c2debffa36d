"""The variables that a loop carries from one pass to the next are found in its bytecode, where it stands."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.training.forgotten_state.carried import find_carried, find_constants, find_outputs

Names = set[str] | None
seen: list[Names] = []
constants: list[set[str]] = []


def steps(count: int = 3) -> Iterator[int]:
    """Give numbers, and note what the function that takes them carries."""
    for number in range(count):
        frame = sys._getframe(1)
        carried = find_carried(frame)
        seen.append(None if carried is None else {name for name in carried if "." not in name})
        constants.append(find_constants(frame))
        yield number


def plain() -> None:
    best, unused, scale = 0.0, 1, 2.0
    for number in steps():
        loss = number * scale
        best = max(best, loss)
    print(best, unused, loss)


def assigned_on_one_path() -> None:
    value = 0
    for number in steps():
        if number % 2:
            value = number
        print(value)


def assigned_on_both_paths() -> None:
    for number in steps():
        value = 1 if number else 2
        try:
            other = value
        except ValueError:
            other = 0
        with contextlib.nullcontext():
            third = other
        print(third)


def inner_loop() -> None:
    total = 0
    for number in steps():
        for each in range(3):
            last = each + number
        total += last
        print([total + 1 for total in range(2)])


def in_a_while_loop() -> None:
    numbers, best = steps(), 1
    while True:
        try:
            number = next(numbers)
        except StopIteration:
            break
        best = max(best, number)


def in_a_closure() -> None:
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return count

    for _ in steps():
        tick()


def no_loop() -> None:
    value = 1
    next(steps())
    print(value)


def long() -> None:
    raise NotImplementedError


# Jumps over more than 255 instructions have an argument in two parts.
exec(
    "def long():\n best = 0\n for number in steps():\n  for each in range(2):\n   other = each\n"
    + "  print(other + number, number)\n" * 60
    + "  best = max(best, other)\n"
)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (plain, {"best", "scale"}), (assigned_on_one_path, {"value"}), (assigned_on_both_paths, set()),
        (inner_loop, {"total"}), (in_a_while_loop, {"numbers", "best"}), (in_a_closure, {"tick"}), (no_loop, None),
        (long, {"best"}),
    ],
)  # fmt: skip
def test_a_variable_is_carried_if_a_pass_may_read_it_before_it_assigns_it(
    function: Callable[[], None], names: Names
) -> None:
    seen.clear()
    function()
    assert seen == [names] * len(seen)
    assert seen


def test_a_constant_is_read_and_never_assigned() -> None:
    constants.clear()
    plain()
    assert constants == [{"scale"}] * 3


class Model:
    def __init__(self) -> None:
        self.total, self.last, self.count, self.order = 0.0, 0.0, 0, random.random()

    def forward(self, x: Any) -> Any:
        self.total += x
        self.last = x * self.order
        return self.last + self.peek()

    def peek(self) -> int:
        self.count = self.count + 1
        return self.count


def test_an_attribute_that_is_assigned_before_it_is_read_is_an_output() -> None:
    codes = [each.__code__ for each in (Model.__init__, Model.forward, Model.peek)]
    assert find_outputs(codes) == {"last"}
