"""Several schedulers of a source are paired by their names, their settings or their order, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiStepLR, StepLR

from holdfast import Recipe
from holdfast.errors import ConfigError
from holdfast.extensions.importing.taking_over import move_in
from tests.support.trainings import make

pytestmark = pytest.mark.usefixtures("same_process")


def two(kind: str = "same") -> Recipe:
    """Build a model with two optimizers, each with a scheduler."""
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    first, second = (torch.optim.SGD(each.parameters(), lr=1.0) for each in model.values())
    other: Any = CosineAnnealingLR(second, 9) if kind == "other" else StepLR(second, 5, 0.5)
    one: Any = StepLR(first, 3, 0.5)
    if kind == "alike":
        one, other = MultiStepLR(first, [3, 6], 0.5), ExponentialLR(second, 0.9)
    return Recipe(
        model=model,
        data=torch.utils.data.TensorDataset(torch.ones(8, 2)),
        optimizer={"a": first, "b": second},
        loss=lambda model, batch: (model["a"](batch[0]) + model["b"](batch[0])).square().mean(),
        batch_size=2,
        schedule={"a": one, "b": other},
    )


def save(folder: Path, names: tuple[str, str], kind: str) -> str:
    """Save a source after four steps, with its schedulers under these names."""
    recipe = two(kind)
    schedulers: list[Any] = [*recipe.schedule.values()]  # type: ignore[union-attr]
    for _ in range(4):
        for optimizer, scheduler in zip(recipe.optimizer.values(), schedulers, strict=True):  # type: ignore[union-attr]
            optimizer.step()
            scheduler.step()
    states = {name: each.state_dict() for name, each in zip(names, schedulers, strict=True)}
    torch.save({"model": recipe.model.state_dict(), "step": 4} | states, folder / "at.pt")
    return str(folder / "at.pt")


@pytest.mark.parametrize(
    ("names", "kind", "note"),
    [
        (("StepLR", "CosineAnnealingLR"), "other", ""),
        (("x", "y"), "other", "scheduler StepLR: x of the source, by its settings"),
        (("x", "y"), "alike", "scheduler ExponentialLR: y of the source, by its settings"),
        (("x", "CosineAnnealingLR"), "other", "scheduler StepLR: x of the source, by its settings"),
        (("scheduler", "scheduler_1"), "same", "in their order: scheduler is StepLR, scheduler_1 is StepLR"),
    ],
)
def test_they_are_paired(tmp_path: Path, names: tuple[str, str], kind: str, note: str) -> None:
    training = make(tmp_path, f"{__name__}:two", kind=kind)
    found = move_in(training, save(tmp_path, names, kind), None, {})
    assert [each.last_epoch for each in training.schedulers] == [4, 4]
    assert not note or any(note in each for each in found.notes)


def test_two_of_one_kind_with_other_names_are_refused(tmp_path: Path) -> None:
    training = make(tmp_path, f"{__name__}:two")
    with pytest.raises(ConfigError, match=r"which of the source's schedulers \(x, y\) is the run's scheduler StepLR"):
        move_in(training, save(tmp_path, ("x", "y"), "same"), None, {})


def test_one_of_the_sources_is_not_taken_twice(tmp_path: Path) -> None:
    training = make(tmp_path, f"{__name__}:two")
    with pytest.raises(ConfigError, match=r"which of the source's schedulers \(y\) is the run's scheduler StepLR"):
        move_in(training, save(tmp_path, ("x", "y"), "other"), None, {})


def test_another_kind_with_the_same_settings_is_refused(tmp_path: Path) -> None:
    training = make(tmp_path, f"{__name__}:two", kind="alike")
    source = save(tmp_path, ("MultiStepLR", "ExponentialLR"), "alike")
    saved = torch.load(source)
    torch.save(saved | {"ExponentialLR": saved["MultiStepLR"]}, source)
    with pytest.raises(ConfigError, match="ExponentialLR: it has milestones, and lacks nothing"):
        move_in(training, source, None, {})


def test_optimizers_that_are_paired_by_their_shapes_are_listed(tmp_path: Path) -> None:
    training = make(tmp_path, f"{__name__}:two", kind="other")
    source = save(tmp_path, ("StepLR", "CosineAnnealingLR"), "other")
    moments = {"x": torch.zeros(1, 2), "y": torch.zeros(1)}
    saved = torch.load(source)
    optimizers = {
        name: {
            **each.state_dict(),
            "state": {0: {"momentum_buffer": moments["x"]}, 1: {"momentum_buffer": moments["y"]}},
        }
        for name, each in zip(("first", "second"), two("other").optimizer.values(), strict=True)  # type: ignore[union-attr]
    }
    torch.save(saved | optimizers, source)
    found = move_in(training, source, None, {"second": "b"})
    assert "optimizer a: first of the source, by the shapes of its parameters" in found.notes
