"""The trail's checksums depend on every bit, name its component, and don't depend on a run's chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Recipe
from holdfast.state.checksum import checksum, checksum_together
from holdfast.training import step_record
from holdfast.training.checksums import describe_components
from holdfast.training.recording import read_lines
from tests.support import trainings
from tests.support.trainings import train_to

pytestmark = pytest.mark.usefixtures("same_process")

TENSORS = {
    "long": torch.arange(5000, dtype=torch.float32) + 0.5,
    "half": torch.arange(777, dtype=torch.bfloat16),
    "flags": torch.arange(13) % 3 == 0,
    "complex": torch.full((3, 5), 1 + 2j, dtype=torch.complex64),
    "matrix": torch.randn(40, 70, generator=torch.Generator().manual_seed(1)),
    "number": torch.tensor(3.0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_checksum_changes_with_every_bit(name: str) -> None:
    tensor = TENSORS[name].clone()
    (before,) = checksum([tensor])
    data = tensor.view(-1).view(torch.uint8)
    for place in {0, len(data) // 2, len(data) - 1}:
        data[place] ^= 1
        assert checksum([tensor]) != [before]
        data[place] ^= 1
    assert checksum([tensor]) == [before]


def test_a_checksum_changes_with_swapped_rows_and_with_the_length() -> None:
    matrix = TENSORS["long"][:4096].view(2, 2048)
    assert len(set(checksum([matrix, matrix.flip(0), torch.zeros(0), torch.zeros(1), torch.zeros(2)]))) == 5


def test_a_checksum_does_not_depend_on_the_layout_in_memory() -> None:
    matrix = TENSORS["matrix"]
    there = torch.zeros(1 + matrix.numel())[1:].view_as(matrix)  # its memory doesn't begin at a word
    there.copy_(matrix)
    one, *others = checksum([matrix, matrix.t().contiguous().t(), there])
    assert others == [one, one]


def test_a_joint_checksum_depends_on_the_order_of_tensors() -> None:
    tensors = list(TENSORS.values())
    assert checksum_together(tensors) == checksum_together([each.clone() for each in tensors])
    assert checksum_together(tensors) != checksum_together(tensors[::-1])
    assert checksum_together([]) == 0


class Sum:
    """An extra with a tensor and a plain number."""

    def __init__(self) -> None:
        self.tensor, self.number = torch.zeros(3), 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "number": self.number}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


def normed() -> Recipe:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return Recipe(
        model=model, data=list(torch.randn(16, 4, generator=torch.Generator().manual_seed(1))), batch_size=4,
        optimizer=optimizer, loss=lambda model, x: model(x).square().mean(), extras={"sum": Sum()},
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )  # fmt: skip


CHANGES: dict[str, Any] = {
    "buffers": lambda recipe: recipe.model[1].running_var.add_(1),
    "optimizer": lambda recipe: recipe.optimizer.param_groups[0].update(lr=0.5),
    "optimizer.exp_avg": lambda recipe: recipe.optimizer.state[recipe.model[0].weight]["exp_avg"].mul_(2),
    "optimizer.exp_avg_sq": lambda recipe: recipe.optimizer.state[recipe.model[0].bias]["exp_avg_sq"].mul_(2),
    "optimizer.step": lambda recipe: recipe.optimizer.state[recipe.model[2].bias]["step"].add_(1),
    "model": lambda recipe: recipe.model[2].weight.data.mul_(2),
    "schedulers": lambda recipe: setattr(recipe.schedule, "last_epoch", 9),
    "extras.sum": lambda recipe: recipe.extras["sum"].tensor.add_(1),
}


@pytest.mark.parametrize("component", CHANGES)
def test_a_change_alters_the_checksum_of_its_own_component_only(tmp_path: Path, component: str) -> None:
    training = trainings.make(tmp_path, f"{__name__}:normed")
    train_to(training, 2)
    before = describe_components(training, in_detail=True)
    assert list(before) == [*CHANGES, "tensors"]  # causes before effects
    CHANGES[component](training.recipe)
    after = describe_components(training, in_detail=True)
    different = [name for name in CHANGES if before[name] != after[name]]
    tensors = [name for name, value in before["tensors"].items() if value != after["tensors"][name]]
    assert different == [component]
    assert len(tensors) == (0 if component in ("optimizer", "schedulers") else 1)


def test_a_plain_number_of_an_extra_alters_its_checksum(tmp_path: Path) -> None:
    training = trainings.make(tmp_path, f"{__name__}:normed")
    before = describe_components(training, in_detail=False)
    training.recipe.extras["sum"].number = 0.25  # type: ignore[attr-defined]
    after = describe_components(training, in_detail=False)
    assert {name for name in before if before[name] != after[name]} == {"extras.sum"}


def test_checksums_are_taken_every_few_steps_and_in_a_proof_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_record, "EVERY_SMALL", 3)
    training = trainings.make(tmp_path, f"{__name__}:normed")
    train_to(training, 4)
    training.record.is_detailed = True
    train_to(training, 6)
    lines = read_lines(training)
    assert [line["step"] for line in lines if "state" in line] == [3, 5, 6]
    assert [line["step"] for line in lines if "tensors" in line.get("state", {})] == [5, 6]
