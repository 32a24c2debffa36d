"""The probe changes nothing, and depends on the last bit of a weight."""

import copy
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as checkpointing

from holdfast import Anneal, Recipe, checkpoint, state
from holdfast.config import Resume
from holdfast.errors import GateTripped, RecipeError
from holdfast.recipe.probe import Probe, compare_probes
from holdfast.training import Gate, Training, capturing, evaluate_recipe, measure_probe, resume
from holdfast.training.recording import read_lines
from tests.support import trainings
from tests.support.trainings import train_to
from tests.support.varied import Points

pytestmark = pytest.mark.usefixtures("same_process")


class Collected:
    """State that the loss changes: a list of the values that it has seen."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"seen": self.seen}

    def load_state_dict(self, saved: dict[str, list[float]]) -> None:
        self.seen = saved["seen"]


def look(model: nn.Module) -> dict[str, Any]:
    """Probe the model, and draw random numbers of every kind."""
    output = model(torch.randn(16, 8) + random.random() + np.random.random())
    return {"output": output, "mean": output.mean()}


def probed(own: bool = False, stream: bool = False) -> Recipe:
    """Build a recipe with dropout, batch norm, a frozen part and a loss that changes a registered extra.

    Args:
        own: whether the recipe has a probe of its own.
    """
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    collected = Collected()
    anneal = Anneal(1.0, 0.0, start_step=0, end_step=8)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = F.mse_loss(model(batch[0]), batch[1]) * (1 + anneal.value)
        collected.seen.append(found.item())
        return found

    data: Any = Points(noise=True)
    return Recipe(
        model=model, data=Endless(data) if stream else data, optimizer=torch.optim.SGD(model.parameters(), 0.01),
        loss=loss, batch_size=16, steps_per_epoch=3, extras={"collected": collected}, anneals={"weight": anneal},
        probe=look if own else None,
    )  # fmt: skip


class Endless:
    """The data as a stream."""

    def __init__(self, data: Points) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


def make(folder: Path, recipe: str = "probed", **settings: Any) -> Training:
    return trainings.make(folder, f"{__name__}:{recipe}", **settings)


def everything(training: Training) -> Any:
    """Return all that the next step depends on, and what a careless probe may leave behind."""
    return (
        state.to_payload(copy.deepcopy(capturing.capture(training))),
        [module.training for module in training.model.modules()],
        [parameter.grad is None for parameter in training.model.parameters()],
        training.generators.digest(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("own", [False, True])
def test_a_measurement_changes_nothing(tmp_path: Path, own: bool) -> None:
    training = make(tmp_path, own=own)
    train_to(training, 2)
    training.model[1].eval()  # one part is frozen
    before = everything(training)
    first = measure_probe(training)
    after = everything(training)
    assert checkpoint.differences(before[0], after[0]) == []
    assert before[1:] == after[1:]
    assert [module.training for module in training.model] == [True, False, True, True]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert measure_probe(training) == first  # whatever the states of the generators


def test_a_failing_probe_changes_nothing(tmp_path: Path) -> None:
    training = make(tmp_path, own=True)
    collected = training.recipe.extras["collected"]

    def fail(model: nn.Module, batch: Any = None) -> Any:
        look(model)
        collected.seen.append(1.0)  # type: ignore[attr-defined]
        raise ZeroDivisionError

    training.recipe.probe = fail
    before = everything(training)
    with pytest.raises(ZeroDivisionError):
        measure_probe(training)
    assert everything(training)[1:] == before[1:]
    training.recipe.probe, training.recipe.loss = None, fail
    collected.load_state_dict({"seen": []})
    with pytest.raises(ZeroDivisionError):
        measure_probe(training)
    assert everything(training)[1:] == before[1:]
    assert collected.state_dict() == {"seen": []}
    assert not training.model._forward_hooks


@pytest.mark.parametrize("own", [False, True])
def test_training_after_a_measurement_gives_the_same_bytes(tmp_path: Path, own: bool) -> None:
    found = []
    for measures in (False, True):
        training = make(tmp_path, own=own)
        for step in range(1, 6):
            if measures:
                measure_probe(training)
            train_to(training, step)
        found.append(state.to_payload(capturing.capture(training)))
    assert checkpoint.differences(*found) == []


@pytest.mark.parametrize("own", [False, True])
def test_the_probe_depends_on_every_weight(tmp_path: Path, own: bool) -> None:
    training = make(tmp_path, own=own)
    train_to(training, 2)
    first = measure_probe(training)
    weights = {name: value for name, value in training.model.state_dict().items() if value.is_floating_point()}
    assert len(weights) == 8  # with those of batch norm, and its means
    for name, value in weights.items():
        kept = value.clone()
        value.view(-1)[0] += 0.01
        assert measure_probe(training).sha256 != first.sha256, name
        value.copy_(kept)
    assert measure_probe(training) == first


@pytest.mark.parametrize("look", [measure_probe, evaluate_recipe])
def test_a_probe_or_evaluation_that_changes_a_weight_is_refused(tmp_path: Path, look: Any) -> None:
    training = make(tmp_path, own=True)

    def change(model: nn.Module) -> dict[str, Any]:
        next(model.parameters()).mul_(2)
        return {}

    training.recipe.probe = training.recipe.evaluate = change
    with pytest.raises(RecipeError, match=r"the parameter 0\.weight changed while the model was evaluated or probed"):
        look(training)


def one_hot(own: bool) -> Recipe:
    """Build a model whose outputs are its weights."""
    model = nn.Linear(8, 1, bias=False)
    return Recipe(
        model=model, data=list(torch.eye(8)), optimizer=torch.optim.SGD(model.parameters(), 0.01), batch_size=8,
        loss=lambda model, x: model(x).square().mean(),
        probe=(lambda model: {"output": model(torch.eye(8))}) if own else None,
    )  # fmt: skip


@pytest.mark.parametrize("own", [False, True])
def test_the_probe_depends_on_the_last_bit_of_a_weight(tmp_path: Path, own: bool) -> None:
    training = make(tmp_path, "one_hot", own=own)
    first = measure_probe(training)
    weights = training.model.weight.detach()[0]
    for number in range(8):
        kept = weights[number].clone()
        weights[number] = kept.nextafter(torch.tensor(math.inf))
        found = measure_probe(training)
        assert compare_probes(first, found, 0.0).startswith("the probe gives a different result than at the save")
        assert compare_probes(first, found, 1e-6) == ""
        weights[number] = kept
    assert measure_probe(training) == first


def test_the_probe_uses_the_next_steps_anneals_and_the_first_batch(tmp_path: Path) -> None:
    """Anneals have their values for the next step. The default batch is the run's first, whatever the step."""
    training = make(tmp_path)
    train_to(training, 2)
    training.recipe.anneals["weight"].value = 99.0
    loss = measure_probe(training).values["loss"]
    assert training.recipe.anneals["weight"].value == 0.75
    with torch.no_grad():
        x, y = training.batches.first()
        assert loss == (1.75 * F.mse_loss(training.model.eval()(x), y)).item()


def test_a_sample_of_the_outputs_and_every_number_go_on_record(tmp_path: Path) -> None:
    training = make(tmp_path)
    outputs = {"a": torch.arange(200.0), "b": torch.tensor([math.inf]), "c": 3, "d": math.nan, "e": torch.zeros(0)}
    training.recipe.probe = lambda model: outputs  # type: ignore[assignment]
    found = measure_probe(training)
    assert found.values == {"b": None, "c": 3.0, "d": None}
    assert (len(found.sample), found.sample[0], found.sample[16], found.sample[-1]) == (32, 0.0, 103.0, None)
    assert Probe.model_validate_json(found.model_dump_json()) == found


def test_the_loss_window_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    training = make(tmp_path)
    assert "loss_window" not in measure_probe(training).values
    train_to(training, 23)
    losses = [line["loss"] for line in read_lines(training)]
    assert len(losses) == 23
    assert measure_probe(training).values["loss_window"] == math.fsum(losses[-20:]) / 20


def test_a_stream_is_probed_with_its_first_batch_once_it_was_read(tmp_path: Path) -> None:
    training = make(tmp_path, stream=True)
    assert measure_probe(training) == Probe()
    train_to(training, 1)
    read_lines(training)
    found = measure_probe(training)
    assert found.sha256
    assert found.sample
    assert measure_probe(training) == found
    assert measure_probe(make(tmp_path, stream=True, own=True)).sha256


class Warming(nn.Module):
    """A model with noise that grows in every step, in training only. The size is an attribute that nothing saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(8, 1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found + self.noise * torch.randn_like(found) if self.training else found


def warming(reentrant: bool = False) -> Recipe:
    model = Warming()

    def grow() -> None:
        model.noise += 0.1

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        output = checkpointing(model, x.requires_grad_(), use_reentrant=True) if reentrant else model(x)
        return F.mse_loss(output, y)

    return Recipe(
        model=model, data=Points(noise=False), optimizer=torch.optim.SGD(model.parameters(), 0.01), batch_size=16,
        loss=loss, after_step=grow,
    )  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_unsaved_state_that_only_training_reads_trips_the_gate(tmp_path: Path, reentrant: bool) -> None:
    before = make(tmp_path, "warming", reentrant=reentrant)
    train_to(before, 2)
    saved = trainings.save_state(before, tmp_path)
    again = make(tmp_path, "warming", reentrant=reentrant)
    said = r"restored exactly, but the gradient of a micro-batch .*: the model, .* reads state that no checkpoint has"
    with pytest.raises(GateTripped, match=said) as caught:
        resume(again, *saved, Gate(), lambda done, total: None)
    assert caught.value.data["check"] == "results"
    resume(again, *saved, Gate("tolerance", 1e-6), lambda done, total: None)
    assert resume(again, *saved, Gate("record"), lambda done, total: None).note.startswith("the gradient of")
    again.recipe.model.noise = before.recipe.model.noise
    resume(again, *saved, Gate(), lambda done, total: None)


def test_the_training_probe_can_be_switched_off(tmp_path: Path) -> None:
    training = make(tmp_path, "warming")
    saved = trainings.save_state(training, tmp_path)
    assert saved[1].probe.gradient
    training.config = training.config.model_copy(update={"resume": Resume(training_probe=False)})
    training.recipe.model.noise = 9.0  # type: ignore[assignment]
    assert measure_probe(training).gradient == ""
    resume(training, *saved, Gate(), lambda done, total: None)


def test_a_dropout_rate_changes_only_the_training_probe(tmp_path: Path) -> None:
    training = make(tmp_path)
    first = measure_probe(training)
    training.model[2].p = 0.4
    found = measure_probe(training)
    assert found.sha256 == first.sha256
    assert found.gradient != first.gradient
