"""Steps after a schedule's end: a run is told that it would train them with a learning rate of 0."""

import math
from pathlib import Path

import pytest

from holdfast import RunConfig, Schedule
from holdfast.training import Training, find_idle
from tests.conftest import Engine
from tests.support.trainings import make


def build(folder: Path, schedule: object, epochs: int) -> Training:
    """Return a training of the toy, 10 steps an epoch, with this schedule and this many epochs."""
    training = make(folder, "tests.support.toy:toy")
    training.recipe.schedule = schedule  # type: ignore[assignment]
    training.config = RunConfig(**training.config.model_dump() | {"epochs": epochs})
    return training


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_steps_after_a_schedules_end_are_named(tmp_path: Path, name: str) -> None:
    epochs = 4
    training = build(tmp_path, Schedule(name, epochs=3.3), epochs)  # type: ignore[arg-type]
    start = math.ceil(3.3 * training.steps_per_epoch)
    (found,) = find_idle(training)
    assert found == (
        f"the learning rate is 0 from step {start} on: the {name} schedule ends after 3.3 of the run's {epochs} epochs"
    )
    training.recipe.schedule = {"ours": Schedule(name, epochs=3), "theirs": Schedule()}  # type: ignore[arg-type]
    (found,) = find_idle(training)
    assert found.startswith("the learning rate of 'ours' is 0")


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("schedule", "epochs"),
    [
        (Schedule("cosine", epochs=3), 3),
        (Schedule("linear", epochs=3, final_lr_scale=0.1), 9),
        (Schedule("constant", epochs=1), 9),
        (Schedule("step", epochs=1), 9),
        (None, 9),
    ],
)
def test_other_schedules_are_good(tmp_path: Path, schedule: Schedule | None, epochs: int) -> None:
    assert find_idle(build(tmp_path, schedule, epochs)) == []


ENDS_EARLY = """
import torch
from torch.utils.data import TensorDataset
from holdfast import Recipe, Schedule

def build() -> Recipe:
    model = torch.nn.Linear(1, 1)
    return Recipe(
        model=model,
        data=TensorDataset(torch.ones(64, 1)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        schedule=Schedule("cosine", epochs=1),
    )
"""


@pytest.mark.slow
def test_an_attempt_warns_of_them(engine: Engine) -> None:
    (engine.folder / "early.py").write_text(ENDS_EARLY)
    done = engine.run(f"recipe={engine.folder}/early.py:build", "epochs=2", "chunk.steps=9")
    assert done.returncode == 0, done.stderr
    assert "warning: the learning rate is 0 from step 2 on: the cosine schedule ends after 1 of" in done.stderr
