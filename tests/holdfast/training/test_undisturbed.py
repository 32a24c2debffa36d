"""A probe and an evaluation restore the model, however careless its code is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Recipe
from holdfast.store.local import LocalStore
from holdfast.training import Training, evaluate_recipe, measure_probe
from tests.support import trainings
from tests.support.trainings import train_to

pytestmark = pytest.mark.usefixtures("same_process")


def make(folder: Path, **settings: Any) -> Training:
    return trainings.make(folder, f"{__name__}:careless", **settings)


class Careless(nn.Module):
    """A model that notes each call in every kind of attribute that a module has, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.register_buffer("still", torch.zeros(()), persistent=False)
        self.total = torch.zeros(())
        self.number, self.scale, self.losses, self.seen = 0, torch.ones(()), [0.0], {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.last + x.sum().detach()
        self.mean += 1
        self.total = self.total + 1
        self.number += 1
        self.scale.data.mul_(1.01)
        self.losses.append(float(self.number))
        self.seen[str(self.number)] = self.number
        self.fresh = self.number
        self.register_buffer(f"call{self.number}", torch.zeros(1), persistent=False)
        scale = self.scale * (1 + len(self.losses) + self.seen["a"] + self.calls + self.last)
        return (x * self.weight).sum(1) * scale / 1000


def careless(epoch: int = 0) -> Recipe:
    """Build a model that changes at each call, and a loss that takes gradients and switches them on and off."""
    model = Careless()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        found = model(x).square().mean()
        (slope,) = torch.autograd.grad(found, x, create_graph=True)
        return found + slope.square().mean()

    return Recipe(
        model=model, data=list(torch.eye(8)), optimizer=torch.optim.SGD(model.parameters(), 0.01), batch_size=2,
        loss=loss, steps_per_epoch=epoch or None,
        evaluate=lambda model: {"calls": float(model.calls), "output": model(torch.ones(1, 8))},
    )  # fmt: skip


def attributes(model: nn.Module) -> dict[str, Any]:
    """Return everything that a careless model keeps."""
    kept = {name: copy.deepcopy(value) for name, value in vars(model).items() if name in ("number", "losses", "seen")}
    tensors = {**dict(model.named_buffers()), "scale": model.scale, "grad": model.weight.grad}
    numbers = {name: None if value is None else value.tolist() for name, value in tensors.items()}
    return kept | numbers | {"fresh": getattr(model, "fresh", None)}


@pytest.mark.parametrize("look", [measure_probe, evaluate_recipe])
def test_a_model_that_changes_at_each_call_is_restored(tmp_path: Path, look: Any) -> None:
    training = make(tmp_path)
    train_to(training, 2)
    training.model.weight.grad = torch.full((8,), 3.0)
    before = attributes(training.model)
    buffers = {name: id(value) for name, value in training.model.named_buffers()}
    first = look(training)
    assert attributes(training.model) == before
    assert {name: id(value) for name, value in training.model.named_buffers()} == buffers
    assert look(training) == first
    assert before["calls"] == 2


def test_a_probe_names_the_values_that_it_changes_and_that_no_checkpoint_has(tmp_path: Path) -> None:
    training = make(tmp_path)
    for _ in range(2):  # values that were put back are not named for that
        measure_probe(training)
        assert training.probes.touched == {
            "model.call1": "Tensor", "model.fresh": "int", "model.losses": "list", "model.mean": "Tensor",
            "model.number": "int", "model.seen": "dict", "model.total": "Tensor",
        }  # fmt: skip


def test_the_content_id_does_not_depend_on_how_often_a_model_was_probed(tmp_path: Path) -> None:
    ends = set()
    for steps in (1, 3, 8):
        training = make(tmp_path, epoch=4)
        store = LocalStore(str(tmp_path / str(steps)))
        for stop in (*range(steps, 8, steps), 8):
            train_to(training, stop)
            saved = trainings.save_step(training, store)
        ends.add(saved.metadata.checkpoint_sha256)
    assert len(ends) == 1
