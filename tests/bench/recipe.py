"""The workload as a recipe. It notes when each of its steps is done, in the file that the environment names."""

import os
import time
from pathlib import Path

from holdfast import Recipe
from tests.bench import workload

STEPS_VARIABLE = "BENCH_STEPS"


def stack(size: str, steps: int) -> Recipe:
    """A run of one epoch of so many steps."""
    model = workload.make_model(size)
    notes = os.open(os.environ[STEPS_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return Recipe(
        model=model,
        data=workload.make_data(size),
        optimizer=workload.make_optimizer(model),
        loss=workload.loss,
        batch_size=workload.SIZES[size].batch,
        steps_per_epoch=steps,
        clip_norm=workload.CLIP_NORM,
        after_step=lambda: os.write(notes, f"{time.time()}\n".encode()),
    )


def read_steps(path: Path) -> list[float]:
    """When each step was done, in seconds since 1970; the last line may not be whole yet."""
    return [float(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
