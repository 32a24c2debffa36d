"""``python -m tests.bench.loop TENSORS``: what a step costs in a loop of a user's own, beside its own code.

Trains in this process, and prints one JSON object of seconds.
"""

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Generator

import torch
from torch import nn

from holdfast import Run
from holdfast.config import Determinism, Log, RunConfig
from holdfast.machine import determinism
from holdfast.training import Training, run_program, steps
from tests.bench.frame import Benchmark, Row, ask, compare, median_of

TENSORS = ("10", "400", "4000")
WARM_UP, STEPS, ROUNDS = 10, 200, 5
# A step of a model with so many tensors takes so long that fewer steps are enough.
MANY, FEW_STEPS = 4000, 30
# What a step may cost more, whatever the number of tensors.
STEP_S = 0.15e-3


def run(full: bool) -> list[Row]:
    """Each number of tensors in a process of its own."""
    rows: list[Row] = []
    for tensors in TENSORS:
        found = measure(tensors)
        state = f"{int(tensors):,} tensors"
        rows.append(compare(state, "Holdfast's time in a step", found["outside"], "the allowed time", STEP_S, 1.0))
        rows.append(compare(state, "Holdfast's time in a step", found["outside"], "a whole step", found["steps"]))
    return rows


def measure(tensors: str) -> dict[str, float]:
    """Return the seconds of a step with so many tensors, and those of them that are Holdfast's; see `SAMPLES`."""
    found = ask("tests.bench.loop", tensors, **determinism.preamble(Determinism()))
    assert isinstance(found, dict)
    return found


def build(tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(tensors // 2)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


# The mean seconds of a step of each round, and those of it that are not the loop's own. They are this thread's
# processor time, which a busy machine changes least.
SAMPLES: dict[str, list[float]] = {"steps": [], "outside": []}


class Hooks:
    """The seconds in the hooks of an optimizer's step that were registered between two calls of `add`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds, self._sign, self._optimizer = 0.0, -1, optimizer
        self.add()

    def add(self) -> None:
        sign, self._sign = self._sign, 1

        def note(*_: object) -> None:
            self.seconds += sign * time.thread_time()

        self._optimizer.register_step_pre_hook(note)
        self._optimizer.register_step_post_hook(note)


def held(run: Run, tensors: int) -> None:
    """Train in a run, and add to `SAMPLES`."""
    model, optimizer = build(tensors)
    hooks = Hooks(optimizer)
    run.keep(model=model, optimizer=optimizer)
    own, began, last = 0.0, 0.0, count_steps(tensors)
    for step in run.steps(per_epoch=10**6):
        now = time.thread_time()
        if step.number == 0:
            hooks.add()
        if step.number == WARM_UP:
            began, own, hooks.seconds = now, 0.0, 0.0
        if step.number == WARM_UP + last:
            SAMPLES["steps"].append((now - began) / last)
            SAMPLES["outside"].append((now - began - own + hooks.seconds) / last)
        loss = learn(model, optimizer)
        own += time.thread_time() - now
        step.log(loss=loss)


def count_steps(tensors: int) -> int:
    """Return how many steps of a round are measured."""
    return FEW_STEPS if tensors >= MANY else STEPS


def main(tensors: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            recipe="tests.bench.loop:held", run="loop", store=folder, log=Log(folder=folder),
            settings={"tensors": tensors},
        )  # fmt: skip

        def serve(training: Training) -> Generator[None, None, None]:
            yield from steps(training, WARM_UP + count_steps(tensors) + 1, lambda: False)

        for _ in range(ROUNDS):
            run_program(config, serve)
    print(json.dumps(median_of(importlib.import_module("tests.bench.loop").SAMPLES)))  # as the run has imported it


BENCHMARK = Benchmark(
    name="loop",
    about="What a run costs in each step of a loop of a user's own, in processor time, with the optimizer's hooks.",
    run=run,
)

if __name__ == "__main__":
    main(int(sys.argv[1]))
