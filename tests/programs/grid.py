"""Programs made by machine: hidden state of each period, kept or not, stopped in each way at each step.

A `Case` is a place of the grid, and `write_program` makes its program. `tests.programs.trials` tries cases.
"""

import itertools
import random
import re
import textwrap
import zlib
from dataclasses import dataclass
from typing import Literal

from tests.programs.shapes import IN_CLASSES, LEARN, OF_AN_EPOCH, PERIODIC, SHAPES, WITHOUT, Shape

State = Literal["kept", "half", "forgotten"]
How = Literal["SIGTERM", "SIGUSR1", "notice", "SIGKILL", "commit", "alone"]
STATES: tuple[State, ...] = ("kept", "half", "forgotten")
# A notice comes with a deadline. ``commit``: SIGKILL at a commit, of the command and its ranks. ``alone``: nobody stops
# the run, but its rehearsals act like a death.
HOWS: tuple[How, ...] = ("SIGTERM", "SIGUSR1", "notice", "SIGKILL", "commit", "alone")
PERIODS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Timing:
    """The lengths of a run.

    Args:
        chunk: the line of ``[chunk]``.
        per_epoch: the steps of an epoch.
        accumulation: the batches from which the optimizer steps once, where the shape leaves that open.
        epochs: the epochs of the run.
    """

    chunk: str
    per_epoch: int
    accumulation: int
    epochs: int

    def __str__(self) -> str:
        return f"{self.chunk.replace(' ', '')},{self.per_epoch}x{self.epochs},{self.accumulation}"


TIMINGS = (
    Timing("epochs = 1", 10, 1, 4),
    Timing("steps = 16", 16, 4, 3),
    Timing("steps = 5", 8, 2, 4),
    Timing("epochs = 1", 9, 1, 4),
    Timing("steps = 20", 10, 1, 4),
    Timing("steps = 12", 12, 3, 3),
    Timing("steps = 7", 10, 2, 4),
    Timing("epochs = 2", 8, 1, 5),
)


@dataclass(frozen=True)
class Case:
    """A place of the grid.

    Args:
        shape: a name in `SHAPES`.
        period: of the hidden state in steps; 0 for an epoch, and for none.
        step: the step after which the run is stopped; with ``commit`` the commit's number.
        is_often_rehearsed: whether it is rehearsed at each commit, rather than as seldom as a long run.
    """

    shape: str
    period: int
    state: State
    timing: Timing
    how: How
    step: int
    is_often_rehearsed: bool

    def __str__(self) -> str:
        return f"{self.program}-{self.timing}-{self.how}-{self.step}"

    @property
    def program(self) -> str:
        """Return the name of the program, without the way in which it is stopped."""
        return f"{self.shape.replace(' ', '_')}-{self.period}-{self.state}"


def list_cases() -> list[Case]:
    """Return the grid: each program with two lengths, and with these in each of the ways to stop it, at some step."""
    programs: list[tuple[str, int, State]] = [
        *itertools.product(PERIODIC | IN_CLASSES, PERIODS, STATES),
        *itertools.product(OF_AN_EPOCH, [0], STATES),
        *itertools.product(WITHOUT, [0], STATES[:1]),
    ]
    cases = []
    for number, (shape, period, state) in enumerate(programs):
        often, seldom = TIMINGS[number % len(TIMINGS)], TIMINGS[(number + 1 + number // 8 % 7) % len(TIMINGS)]
        for timing, is_often in ((often, True), (seldom, False)):
            for how in HOWS:
                draw = random.Random(zlib.crc32(f"{shape}{period}{state}{timing}{how}".encode()))
                last = 2 if how == "commit" else 2 * timing.per_epoch
                step = 0 if how == "alone" else draw.randint(1, last)
                cases.append(Case(shape, period, state, timing, how, step, is_often))
    return cases


def list_kept(shape: Shape, state: State, period: int) -> set[str]:
    """Return the names of hidden state that a program keeps; a half of them changes with the period."""
    if state != "half":
        return {*shape.state} if state == "kept" else set()
    return {name for number, name in enumerate(shape.state) if number % 2 == period % 2}


def write_program(case: Case) -> str:
    """Return the source of a case's program, as a user would write it."""
    shape, timing = SHAPES[case.shape], case.timing
    kept = list_kept(shape, case.state, case.period)

    def spell(text: str, depth: int) -> str:
        text = re.sub(r"^( *)LEARN$", lambda found: textwrap.indent(_learn(timing), found[1]), text, flags=re.MULTILINE)
        for name in shape.numbers:
            text = text.replace(f"{{{name}}}", f'state["{name}"]' if name in kept else name)
        for name, value in (("P", case.period), ("N", timing.per_epoch)):
            text = re.sub(rf"\b{name}\b", str(value), text)
        return textwrap.indent(text.strip("\n"), "    " * depth) + "\n" if text.strip() else ""

    header = HEADER + spell(_write_classes(shape, kept), 0)
    if shape.is_recipe:
        extras = ', extras={"ahead": ahead}' if kept else ""
        return header + RECIPE.format(
            count=8 * timing.per_epoch, setup=shape.setup, rest=f"grad_accum={timing.accumulation}{extras}"
        )
    head, first = _head(shape, kept, case.period)
    return (
        header
        + LOOP.format(count=8 * timing.per_epoch)
        + spell(shape.setup, 1)
        + spell(_keep(shape, kept, timing), 1)
        + "    for epoch in run.epochs(loader):\n"
        + spell(shape.begin, 2)
        + f"        for {head}:\n"
        + spell(first, 3)
        + spell(shape.step, 3)
        + "            run.log(loss=loss)\n"
        + spell(shape.end, 2)
    )


def _keep(shape: Shape, kept: set[str], timing: Timing) -> str:
    """Return the lines that make the numbers of a program, and keep its state."""
    lines = [f"{name} = {value}" for name, value in shape.numbers.items() if name not in kept]
    objects = ["model", "optimizer", *(name for name in shape.objects if name in kept)]
    if numbers := [name for name in shape.numbers if name in kept]:
        lines.append("state = {" + ", ".join(f'"{name}": {shape.numbers[name]}' for name in numbers) + "}")
        objects.append("state")
    if timing.accumulation > 1 and LEARN in shape.step:
        lines.append('batches = {"seen": 0}')
        objects.append("batches")
    if kept.intersection(shape.attributes) and "BUFFER" not in shape.classes:
        objects.append("ahead")
    return "\n".join([*lines, f"run.keep({', '.join(f'{name}={name}' for name in objects)})"])


def _write_classes(shape: Shape, kept: set[str]) -> str:
    """Return a program's classes, the last of which saves the attributes that are kept."""
    buffer = r'self.register_buffer("\1", torch.zeros(()){})'
    attributes, text = [name for name in shape.attributes if name in kept], shape.classes
    for name in shape.attributes:
        text = re.sub(rf"BUFFER\(({name})\)", buffer.format("" if name in kept else ", persistent=False"), text)
    if attributes and text == shape.classes:
        saved = ", ".join(f'"{name}": self.{name}' for name in attributes)
        restored = "".join(f'        self.{name} = state["{name}"]\n' for name in attributes)
        text += f"\n    def state_dict(self):\n        return {{{saved}}}\n"
        text += f"\n    def load_state_dict(self, state):\n{restored}"
    return text


def _head(shape: Shape, kept: set[str], period: int) -> tuple[str, str]:
    """Return the head of the loop over batches, and the lines that begin a step."""
    if shape.index:
        if shape.index in kept and shape.is_periodic:
            number = "step.number" if period else "step.number % len(loader)"
            return "step in run.steps()", f"{shape.index} = {number}\nx, y = step.batch"
        return f"{shape.index}, (x, y) in enumerate(run.batches())", ""
    if shape.zipped:
        if shape.zipped in kept:
            return "step in run.steps()", f"x, y = step.batch\nz = {shape.zipped}[step.number % len(loader)]"
        return f"(x, y), z in zip(run.batches(), {shape.zipped})", ""
    return "x, y in run.batches()", ""


def _learn(timing: Timing) -> str:
    if timing.accumulation == 1:
        return "optimizer.zero_grad()\nloss.backward()\noptimizer.step()"
    return (
        f'(loss / {timing.accumulation}).backward()\nbatches["seen"] += 1\n'
        f'if batches["seen"] % {timing.accumulation} == 0:\n    optimizer.step()\n    optimizer.zero_grad()'
    )


HEADER = """
import copy
import random
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def fit(model, x, y):
    return F.mse_loss(model(x), y)


""".lstrip()

LOOP = """

def train(run: holdfast.Run) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    points = torch.randn({count}, 4, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8, shuffle=True)
"""

RECIPE = """

def train() -> holdfast.Recipe:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    points = torch.randn({count}, 4, generator=torch.Generator().manual_seed(7))
    {setup}
    return holdfast.Recipe(
        model=model, data=TensorDataset(points, points.sum(1, keepdim=True)), optimizer=optimizer,
        loss=lambda model, batch: fit(model, *batch), batch_size=8, after_step=ahead.step, {rest},
    )
"""

CASES = list_cases()
