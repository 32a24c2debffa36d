"""A recipe whose ranks vanish: SIGKILL ends one of them at a chosen place of a chosen step, or at any moment."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import Recipe, Run
from tests.support.shares import averaged

# Faults as JSON: lists of a place, a step, a rank, and a file that the fault creates. While it exists nothing happens.
# Without a name of the file it always happens.
# The places of a kill: in the backward pass of a step, before the optimizer's step, after it, in the evaluation after a
# step; and before the first step, as step 0: in the import of this module, in the building of the recipe, in a restore.
# Or the loss or the building raises an error, or a step switches determinism off.
FAULTS = "VANISHING_FAULTS"
# Milliseconds: a kill at the place ``later`` comes so long after the step.
LATER_MS = "VANISHING_LATER_MS"
# Seconds that a rank waits before its kill, so that a test sees each rank even on a busy machine.
PAUSE_S = "VANISHING_PAUSE_S"
# The file to which each rank adds a line for each step that it has completed: its number and the step.
NOTES = "VANISHING_NOTES"


def reach(place: str, step: int = 0) -> None:
    """Let the faults of this place, step and rank happen."""
    for where, when, who, struck in json.loads(os.environ.get(FAULTS, "[]")):
        if (where, when, who) != (place, step, int(os.environ.get("RANK", 0))) or (struck and Path(struck).exists()):
            continue
        if struck:
            Path(struck).touch()
        if place == "raise":  # what new ranks may not meet
            raise OSError("as it was told to")
        if place == "fail":
            raise ZeroDivisionError("as it was told to")
        if place == "refuse":
            torch.use_deterministic_algorithms(False)
        elif place == "later":
            threading.Timer(float(os.environ[LATER_MS]) / 1000, _kill).start()
        else:
            _kill()


def _kill() -> None:
    time.sleep(float(os.environ.get(PAUSE_S, "0")))
    os.kill(os.getpid(), signal.SIGKILL)


reach("import")


def vanishing(how: str = "") -> Recipe:
    """Build the recipe `averaged`, in which the environment's faults happen."""
    reach("build")
    reach("fail")
    recipe = averaged(how)
    model, optimizer, rank = recipe.model, recipe.optimizer, int(os.environ.get("RANK", 0))
    weight = model.get_parameter("head.weight")
    recipe.extras["average"].register_load_state_dict_pre_hook(lambda *_: reach("restore"))

    def completed() -> int:
        return max((int(state["step"]) for state in optimizer.state.values()), default=0)

    def begin_backward(_: Any) -> None:  # the gradient of the training probe doesn't go through this hook
        reach("backward", completed() + 1)
        reach("raise", completed() + 1)

    def after_step() -> None:
        for place in ("after", "refuse", "later"):
            reach(place, completed())
        assert recipe.after_step is not None
        recipe.after_step()
        if NOTES in os.environ:
            with Path(os.environ[NOTES]).open("a") as notes:
                notes.write(f"{rank} {completed()}\n")

    def evaluate(model: Any) -> dict[str, Any]:
        reach("evaluate", completed())
        assert recipe.evaluate is not None
        return dict(recipe.evaluate(model))

    weight.register_post_accumulate_grad_hook(begin_backward)
    optimizer.register_step_pre_hook(lambda *_: reach("optimizer", completed() + 1))
    return replace(recipe, after_step=after_step, evaluate=evaluate)


def waiting(run: Run) -> None:
    """Train a loop whose ranks wait for each other while they build it, connected already."""

    def meet() -> None:
        if run.world_size > 1:
            torch.distributed.barrier()

    meet()
    reach("build")
    meet()
    model = run.wrap(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
