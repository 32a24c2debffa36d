"""Optimizers that don't load torch's compiler, which takes a second of each process's start, before a program uses it.

torch's optimizers call ``torch._dynamo.disable`` and ``torch._dynamo.graph_break`` in each step, and when they are
built. Both do nothing while nothing is compiled, but the first call imports the whole compiler.
"""

import functools
import sys
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.memory import is_on

COMPILER = "torch._dynamo"
# The attribute in which the decorator ``torch._disable_dynamo`` keeps the function that it calls.
CALLED = "__dynamo_disable"


def load_compiler_late() -> None:
    """Let optimizers call the compiler only after something else has imported it.

    The results are the same. In a version of torch whose functions look different, nothing changes.
    """
    if COMPILER in sys.modules or not is_on("late compiler"):
        return
    for method in _list_methods(Optimizer, "inner"):
        setattr(method.__wrapped__, CALLED, _call_late(method))
    for optimizer in vars(torch.optim).values():
        if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
            for step in _list_methods(optimizer, "_use_grad"):
                optimizer.step = _step_late(step)  # type: ignore[method-assign]


def _list_methods(owner: type, code: str) -> list[Any]:
    """Return the methods of a class that one of torch's decorators has made, by the name of the function in it."""
    functions = [each for each in vars(owner).values() if isinstance(each, FunctionType)]
    return [each for each in functions if each.__code__.co_name == code and hasattr(each, "__wrapped__")]


def _call_late(decorated: Any) -> Any:
    """Return a function that calls the undecorated function while the compiler isn't loaded."""
    function = decorated.__wrapped__

    def call(*args: Any, **options: Any) -> Any:
        if COMPILER not in sys.modules:
            return function(*args, **options)
        delattr(function, CALLED)  # the decorator now makes its own
        return decorated(*args, **options)

    return call


def _step_late(decorated: Any) -> Any:
    """Return an optimizer's step that calls the undecorated step while the compiler isn't loaded."""
    function = decorated.__wrapped__

    @functools.wraps(function)
    def step(*args: Any, **options: Any) -> Any:
        if COMPILER in sys.modules:
            return decorated(*args, **options)
        with torch.set_grad_enabled(args[0].defaults["differentiable"]):
            return function(*args, **options)

    return step
