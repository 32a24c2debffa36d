"""State of the process and the machine: flags, variables, files, time, addresses."""

import os
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import Recipe, Run
from tests.programs.network import PER_EPOCH, Batch, Clock, begin, draw, fit, grow, learn, make

SETTINGS = types.SimpleNamespace(level=0)


def number_in_settings(run: Run, after: int) -> None:
    """Raise a number in a settings object once."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            SETTINGS.level += 1
        step.log(loss=learn(fit(model, draw()) * (1 + SETTINGS.level), optimizer))


def environment_variable(run: Run, after: int) -> None:
    """Set an environment variable, which later steps read."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            os.environ["MY_SCALE"] = "1.5"
        step.log(loss=learn(fit(model, draw()) * float(os.environ.get("MY_SCALE", "1")), optimizer))


def default_dtype(run: Run, after: int) -> None:
    """Change torch's default dtype once, so that later steps draw numbers in double precision."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            torch.set_default_dtype(torch.float64)
        x = torch.randn(8, 8).float()
        step.log(loss=learn(fit(model, (x, x.sum(1, keepdim=True))), optimizer))


def denormal_numbers(after: int) -> Recipe:
    """From one step on, let torch flush denormal numbers to zero."""
    clock = Clock()

    def follow() -> None:
        clock.tick()
        if clock.steps == after:
            torch.set_flush_denormal(True)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tiny = torch.full((16,), 1e-39) * torch.full((16,), 0.5)
        return fit(model, batch) * (1 + tiny * 1e38).mean()

    return make(loss, after_step=follow, extras={"clock": clock})


def deterministic_algorithms(run: Run, after: int) -> None:
    """Switch off deterministic algorithms in a step."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            torch.use_deterministic_algorithms(False)
        step.log(loss=learn(fit(model, draw()), optimizer))


def autocast_entered(run: Run, after: int) -> None:
    """Enter autocast by hand, and never leave it."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            torch.autocast("cpu", torch.bfloat16).__enter__()
        x, y = draw()
        step.log(loss=learn((model(x).float() - y).square().mean(), optimizer))


def hooks_on_saved_tensors(run: Run, after: int) -> None:
    """From one step on, round the tensors that are saved for the backward pass."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            torch.autograd.graph.saved_tensors_hooks(
                lambda each: each.bfloat16() if each.is_floating_point() else each, lambda each: each.float()
            ).__enter__()
        step.log(loss=learn(fit(model, draw()), optimizer))


def _folder() -> Path:
    return Path(os.environ["PROGRAM_FILES"])


def file_on_disk(run: Run, after: int) -> None:
    """Count in a file, which keeps the count when the process dies."""
    model, optimizer = begin(run)
    path = _folder() / "count"
    for step in run.steps(per_epoch=PER_EPOCH):
        count = 1 + (int(path.read_text("utf-8")) if path.exists() else 0)
        beside = path.with_suffix(".new")
        beside.write_text(str(count), "utf-8")
        beside.replace(path)
        step.log(loss=learn(fit(model, draw()) * grow(count, after), optimizer))


def memory_map(run: Run, after: int) -> None:
    """Write into a memory map of a file."""
    model, optimizer = begin(run)
    path = _folder() / "visits.npy"
    if not path.exists():
        np.save(path, np.zeros(4))
    visits: Any = np.lib.format.open_memmap(path, mode="r+")
    for step in run.steps(per_epoch=PER_EPOCH):
        visits[0] += 1
        visits.flush()
        step.log(loss=learn(fit(model, draw()) * grow(visits[0], after), optimizer))


def clock_on_the_wall(run: Run, after: int) -> None:
    """Weight the loss by the time of day."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        late = time.time() % 1 if step.number >= after else 0.0
        step.log(loss=learn(fit(model, draw()) * (1 + late), optimizer))


def measured_time(after: int) -> Recipe:
    """Lower the learning rate by the time for which the program has run."""
    clock, began = Clock(), time.perf_counter()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return fit(model, batch) / (1 + (time.perf_counter() - began) * (clock.steps >= after))

    return make(loss, after_step=clock.tick, extras={"clock": clock}, probe=_probe)


def _probe(model: nn.Module) -> Any:
    return {"output": model(torch.ones(2, 8))}


def number_of_the_process(run: Run, after: int) -> None:
    """Seed noise with the process id."""
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        noise = np.random.default_rng((os.getpid(), step.number)).random() if step.number >= after else 0.0
        step.log(loss=learn(fit(model, draw()) * (1 + noise), optimizer))


def entropy_of_the_system(after: int) -> Recipe:
    """Draw from a generator that the operating system seeds."""
    clock, noise = Clock(), np.random.default_rng()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return fit(model, batch) * (1 + float(noise.random()) * (clock.steps >= after))

    return make(loss, after_step=clock.tick, extras={"clock": clock}, probe=_probe)
