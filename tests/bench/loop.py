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

TENSORS = ("10", "400")
WARM_UP, STEPS, ROUNDS = 10, 200, 5
# What a step may cost more: for itself, and for each tensor of the model.
STEP_S, TENSOR_S = 0.5e-3, 5e-6


def run(full: bool) -> list[Row]:
    """Each number of tensors in a process of its own."""
    rows: list[Row] = []
    for tensors in TENSORS:
        found = ask("tests.bench.loop", tensors, **determinism.preamble(Determinism()))
        reach, state = STEP_S + TENSOR_S * int(tensors), f"{tensors} tensors"
        rows.append(compare(state, "Holdfast's time in a step", found["outside"], "the allowed time", reach, 1.0))
        rows.append(compare(state, "Holdfast's time in a step", found["outside"], "a whole step", found["steps"]))
    return rows


def build(tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(tensors // 2)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


# The mean seconds of a step of each round, and those of it that are not the loop's own.
SAMPLES: dict[str, list[float]] = {"steps": [], "outside": []}


def held(run: Run, tensors: int) -> None:
    """Train in a run, and add to `SAMPLES`."""
    model, optimizer = build(tensors)
    run.keep(model=model, optimizer=optimizer)
    own = 0.0
    for step in run.steps(per_epoch=10**6):
        now = time.perf_counter()
        if step.number == WARM_UP:
            began, own = now, 0.0
        if step.number == WARM_UP + STEPS:
            SAMPLES["steps"].append((now - began) / STEPS)
            SAMPLES["outside"].append((now - began - own) / STEPS)
        loss = learn(model, optimizer)
        own += time.perf_counter() - now
        step.log(loss=loss)


def main(tensors: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            recipe="tests.bench.loop:held", run="loop", store=folder, log=Log(folder=folder),
            settings={"tensors": tensors},
        )  # fmt: skip

        def serve(training: Training) -> Generator[None, None, None]:
            yield from steps(training, WARM_UP + STEPS + 1, lambda: False)

        for _ in range(ROUNDS):
            run_program(config, serve)
    print(json.dumps(median_of(importlib.import_module("tests.bench.loop").SAMPLES)))  # as the run has imported it


BENCHMARK = Benchmark(
    name="loop",
    about="What a run costs in each step of a loop of a user's own.",
    run=run,
)

if __name__ == "__main__":
    main(int(sys.argv[1]))
