"""The probe disturbs nothing and sees the last bit of a weight; its limits hold at every save and every resume."""

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

from holdfast import Anneal, Limits, Recipe, checkpoint, state
from holdfast.config import Resume
from holdfast.errors import ConfigError, GateTripped, RecipeError, Unhealthy
from holdfast.probe import Probe, check_health, compare
from holdfast.store.local import LocalStore
from holdfast.training import Gate, Training, capturing, evaluate, measure, resume
from tests.support import trainings
from tests.support.trainings import train_to
from tests.support.varied import Points

pytestmark = pytest.mark.usefixtures("same_process")


# ---- limits


@pytest.mark.parametrize(
    ("limits", "value", "before", "said"),
    [
        (Limits(min=0.5), 0.5, None, ""),
        (Limits(min=0.5), 0.25, None, "x is 0.25, below 0.5"),
        (Limits(min=0), -0.5, None, "x is -0.5, below 0"),
        (Limits(max=0.5), 0.5, None, ""),
        (Limits(max=0.5), 0.75, None, "x is 0.75, above 0.5"),
        (Limits(max=0), 0.5, None, "x is 0.5, above 0"),
        (Limits(min=0.25, max=0.5), 0.75, None, "x is 0.75, above 0.5"),
        (Limits(min=0.25, max=0.5), 0.125, None, "x is 0.125, below 0.25"),
        (Limits(jump=2), 2.0, 1.0, ""),
        (Limits(jump=2), 2.5, 1.0, "x is 2.5, more than 2 times 1"),
        (Limits(jump=2), 99.0, None, ""),  # there is no checkpoint before
        (Limits(max=3, jump=2), 2.5, 1.0, "x is 2.5, more than 2 times 1"),
        (Limits(max=3, jump=2), 4.0, 3.0, "x is 4, above 3"),
    ],
)
def test_a_limit_complains_of_what_is_outside(limits: Limits, value: float, before: float | None, said: str) -> None:
    earlier = None if before is None else Probe(values={"x": before})
    assert check_health(Probe(values={"x": value, "y": 1e9}), {"x": limits}, earlier) == ([said] if said else [])


def test_a_number_that_the_checkpoint_before_had_not_does_not_jump() -> None:
    for before in (Probe(values={"y": 1.0}), Probe(values={"x": None})):
        assert check_health(Probe(values={"x": 99.0}), {"x": Limits(jump=2)}, before) == []


@pytest.mark.parametrize("limits", [{}, {"x": Limits(min=0)}, {"y": Limits(max=1)}])
def test_what_is_not_finite_always_complains(limits: dict[str, Limits]) -> None:
    found = check_health(Probe(values={"y": 0.0, "x": None}), limits)
    assert found == ["x is not finite"]


def test_every_complaint_is_made() -> None:
    probe = Probe(values={"a": None, "b": 3.0, "c": -3.0})
    assert check_health(probe, {"c": Limits(min=-1), "b": Limits(max=1), "a": Limits(max=1)}) == [
        "a is not finite", "c is -3, below -1", "b is 3, above 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"), [({}, "give min, max or jump"), ({"min": 2, "max": 1}, "min = 2 is above max = 1")]
)
def test_limits_that_limit_nothing_or_cannot_be_met_are_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Limits(**fields)


# ---- comparing

OLD, NEW = "a" * 64, "b" * 64


def probe(sha256: str = OLD, sample: tuple[float | None, ...] = (), **values: float | None) -> Probe:
    return Probe(sha256=sha256, values=values, sample=list(sample))


@pytest.mark.parametrize(
    ("saved", "found", "tolerance", "said"),
    [
        (probe(x=1.0), probe(x=2.0), 0.0, ""),  # the digest is of everything
        (probe(sample=(1.0,)), probe(sample=(9.0,)), 1e-3, ""),
        (probe("", x=1.0), probe(NEW, x=2.0), 0.0, ""),  # the recipe has got a probe
        (probe(OLD, x=1.0), probe("", x=2.0), 0.0, ""),  # or lost it
        (probe("", loss_window=1.0), probe("", loss_window=2.0), 0.0, ""),
        (
            probe(),
            probe(NEW),
            0.0,
            f"the probe gave {NEW[:12]}, and {OLD[:12]} when it was saved (0 of its size apart)",
        ),
        (probe(sample=(4.0,)), probe(NEW, (3.0,)), 0.0, "(0.25 of its size apart)"),
        (probe(sample=(4.0,)), probe(NEW, (3.0, 3.0)), 0.0, f"{OLD[:12]} when it was saved"),
        (probe(sample=(4.0,)), probe(NEW, (3.0,)), 0.25, ""),
        (probe(sample=(4.0,)), probe(NEW, (3.0,)), 0.2, "differs by 0.25 of its size, where 0.2 is allowed"),
        (probe(sample=(-4.0,)), probe(NEW, (-5.0,)), 0.2, "differs by 0.25 of its size"),
        (probe(sample=(0.0,)), probe(NEW, (0.5,)), 0.25, "differs by 0.5 of its size"),
        (probe(sample=(100.0, 1.0)), probe(NEW, (100.0, 2.0)), 0.01, ""),
        (probe(x=4.0), probe(NEW, x=3.0), 0.2, "differs by 0.25 of its size"),
        (probe(x=4.0, y=1.0), probe(NEW, x=4.0, z=9.0), 0.2, ""),
        (probe(loss_window=4.0), probe(NEW, loss_window=3.0), 0.2, ""),  # it is of the steps, not of the model
        (probe(sample=(1.0, None)), probe(NEW, (1.0, None)), 0.2, ""),  # health complains of it
        (probe(sample=(1.0, None)), probe(NEW, (1.0, 1.0)), 0.2, "differs in kind"),
        (probe(sample=(1.0,)), probe(NEW, (1.0, 1.0)), 0.2, "differs in kind"),
        (probe(x=1.0), probe(NEW, x=None), 0.2, "differs in kind"),
    ],
)
def test_two_probes_are_compared(saved: Probe, found: Probe, tolerance: float, said: str) -> None:
    difference = compare(saved, found, tolerance)
    assert said in difference
    assert bool(said) == bool(difference)


# ---- measuring


class Collected:
    """Whatever the loss has seen: state that it changes."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"seen": self.seen}

    def load_state_dict(self, saved: dict[str, list[float]]) -> None:
        self.seen = saved["seen"]


def look(model: nn.Module) -> dict[str, Any]:
    """A probe that draws random numbers of every kind."""
    output = model(torch.randn(16, 8) + random.random() + np.random.random())
    return {"output": output, "mean": output.mean()}


def probed(own: bool = False, stream: bool = False) -> Recipe:
    """Dropout, batch norm, a frozen part and a loss that changes what is registered.

    Args:
        own: whether it has a probe of its own.
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
    """All that the next step depends on, and what a careless probe leaves behind."""
    return (
        state.to_payload(copy.deepcopy(capturing.capture(training))),
        [module.training for module in training.model.modules()],
        [parameter.grad is None for parameter in training.model.parameters()],
        training.generators.digest(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("own", [False, True])
def test_measuring_changes_nothing(tmp_path: Path, own: bool) -> None:
    training = make(tmp_path, own=own)
    train_to(training, 2)
    training.model[1].eval()  # one part is frozen
    before = everything(training)
    first = measure(training)
    after = everything(training)
    assert checkpoint.differences(before[0], after[0]) == []
    assert before[1:] == after[1:]
    assert [module.training for module in training.model] == [True, False, True, True]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert measure(training) == first  # wherever the generators are


def test_what_goes_wrong_leaves_nothing_behind(tmp_path: Path) -> None:
    training = make(tmp_path, own=True)
    collected = training.recipe.extras["collected"]

    def fail(model: nn.Module, batch: Any = None) -> Any:
        look(model)
        collected.seen.append(1.0)  # type: ignore[attr-defined]
        raise ZeroDivisionError

    training.recipe.probe = fail
    before = everything(training)
    with pytest.raises(ZeroDivisionError):
        measure(training)
    assert everything(training)[1:] == before[1:]
    training.recipe.probe, training.recipe.loss = None, fail
    collected.load_state_dict({"seen": []})
    with pytest.raises(ZeroDivisionError):
        measure(training)
    assert everything(training)[1:] == before[1:]
    assert collected.state_dict() == {"seen": []}
    assert not training.model._forward_hooks


@pytest.mark.parametrize("own", [False, True])
def test_training_goes_on_as_if_nobody_had_measured(tmp_path: Path, own: bool) -> None:
    found = []
    for measures in (False, True):
        training = make(tmp_path, own=own)
        for step in range(1, 6):
            if measures:
                measure(training)
            train_to(training, step)
        found.append(state.to_payload(capturing.capture(training)))
    assert checkpoint.differences(*found) == []


@pytest.mark.parametrize("own", [False, True])
def test_every_weight_counts(tmp_path: Path, own: bool) -> None:
    training = make(tmp_path, own=own)
    train_to(training, 2)
    first = measure(training)
    weights = {name: value for name, value in training.model.state_dict().items() if value.is_floating_point()}
    assert len(weights) == 8  # those of batch norm, and its means, among them
    for name, value in weights.items():
        kept = value.clone()
        value.view(-1)[0] += 0.01
        assert measure(training).sha256 != first.sha256, name
        value.copy_(kept)
    assert measure(training) == first


class Careless(nn.Module):
    """Notes each call in every way that a module has, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.number, self.scale, self.losses, self.seen = 0, torch.ones(()), [0.0], {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.last + x.sum().detach()
        self.number += 1
        self.scale.data.mul_(1.01)
        self.losses.append(float(self.number))
        self.seen[str(self.number)] = self.number
        self.fresh = self.number
        self.register_buffer(f"call{self.number}", torch.zeros(1))
        scale = self.scale * (1 + len(self.losses) + self.seen["a"] + self.calls + self.last)
        return (x * self.weight).sum(1) * scale / 1000


def careless(epoch: int = 0) -> Recipe:
    """A loss that takes gradients, toggles them, and a model that is changed whenever it is called."""
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
    """Everything that a careless model keeps."""
    kept = {name: copy.deepcopy(value) for name, value in vars(model).items() if name in ("number", "losses", "seen")}
    tensors = {**dict(model.named_buffers()), "scale": model.scale, "grad": model.weight.grad}
    numbers = {name: None if value is None else value.tolist() for name, value in tensors.items()}
    return kept | numbers | {"fresh": getattr(model, "fresh", None)}


@pytest.mark.parametrize("look", [measure, evaluate])
def test_a_model_that_changes_whenever_it_is_called_is_put_back(tmp_path: Path, look: Any) -> None:
    training = make(tmp_path, "careless")
    train_to(training, 2)
    training.model.weight.grad = torch.full((8,), 3.0)
    before = attributes(training.model)
    buffers = {name: id(value) for name, value in training.model.named_buffers()}
    first = look(training)
    assert attributes(training.model) == before
    assert {name: id(value) for name, value in training.model.named_buffers()} == buffers
    assert look(training) == first
    assert before["calls"] == 2


def test_the_content_id_does_not_depend_on_how_often_a_model_was_probed(tmp_path: Path) -> None:
    ends = set()
    for steps in (1, 3, 8):
        training = make(tmp_path, "careless", epoch=4)
        store = LocalStore(str(tmp_path / str(steps)))
        for stop in (*range(steps, 8, steps), 8):
            train_to(training, stop)
            saved = trainings.save_step(training, store)
        ends.add(saved.metadata.checkpoint_sha256)
    assert len(ends) == 1


@pytest.mark.parametrize("look", [measure, evaluate])
def test_what_changes_a_weight_where_it_may_only_look_is_refused(tmp_path: Path, look: Any) -> None:
    training = make(tmp_path, own=True)

    def change(model: nn.Module) -> dict[str, Any]:
        next(model.parameters()).mul_(2)
        return {}

    training.recipe.probe = training.recipe.evaluate = change
    with pytest.raises(RecipeError, match=r"the parameter 0\.weight changed while the model was only looked at"):
        look(training)


def one_hot(own: bool) -> Recipe:
    """Its outputs are its weights."""
    model = nn.Linear(8, 1, bias=False)
    return Recipe(
        model=model, data=list(torch.eye(8)), optimizer=torch.optim.SGD(model.parameters(), 0.01), batch_size=8,
        loss=lambda model, x: model(x).square().mean(),
        probe=(lambda model: {"output": model(torch.eye(8))}) if own else None,
    )  # fmt: skip


@pytest.mark.parametrize("own", [False, True])
def test_a_weight_counts_to_its_last_bit(tmp_path: Path, own: bool) -> None:
    training = make(tmp_path, "one_hot", own=own)
    first = measure(training)
    weights = training.model.weight.detach()[0]
    for number in range(8):
        kept = weights[number].clone()
        weights[number] = kept.nextafter(torch.tensor(math.inf))
        found = measure(training)
        assert compare(first, found, 0.0).startswith(f"the probe gave {found.sha256[:12]}, and {first.sha256[:12]}")
        assert compare(first, found, 1e-6) == ""
        weights[number] = kept
    assert measure(training) == first


def test_what_is_measured_is_what_the_next_step_would_see(tmp_path: Path) -> None:
    """Anneals have their values for it; by itself it is the first micro-batch of the run, whatever the step is."""
    training = make(tmp_path)
    train_to(training, 2)
    training.recipe.anneals["weight"].value = 99.0
    loss = measure(training).values["loss"]
    assert training.recipe.anneals["weight"].value == 0.75
    with torch.no_grad():
        x, y = training.batches.first()
        assert loss == 1.75 * F.mse_loss(training.model.eval()(x), y).item()


def test_a_sample_of_the_outputs_and_every_number_go_on_record(tmp_path: Path) -> None:
    training = make(tmp_path)
    outputs = {"a": torch.arange(200.0), "b": torch.tensor([math.inf]), "c": 3, "d": math.nan, "e": torch.zeros(0)}
    training.recipe.probe = lambda model: outputs  # type: ignore[assignment]
    found = measure(training)
    assert found.values == {"b": None, "c": 3.0, "d": None}
    assert (len(found.sample), found.sample[0], found.sample[16], found.sample[-1]) == (32, 0.0, 103.0, None)
    assert Probe.model_validate_json(found.model_dump_json()) == found


def test_the_loss_window_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    training = make(tmp_path)
    assert "loss_window" not in measure(training).values
    train_to(training, 23)
    losses = [line["loss"] for line in training.read_metrics()]
    assert len(losses) == 23
    assert measure(training).values["loss_window"] == math.fsum(losses[-20:]) / 20


def test_a_stream_is_probed_with_its_first_batch_once_that_is_read(tmp_path: Path) -> None:
    training = make(tmp_path, stream=True)
    assert measure(training) == Probe()
    train_to(training, 1)
    training.read_metrics()
    found = measure(training)
    assert found.sha256
    assert found.sample
    assert measure(training) == found
    assert measure(make(tmp_path, stream=True, own=True)).sha256


class Warming(nn.Module):
    """Has noise that grows in every step, and in training alone: an attribute that no state_dict has."""

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
def test_what_only_training_reads_and_nothing_saves_trips_the_gate(tmp_path: Path, reentrant: bool) -> None:
    before = make(tmp_path, "warming", reentrant=reentrant)
    train_to(before, 2)
    saved = trainings.save_state(before, tmp_path)
    again = make(tmp_path, "warming", reentrant=reentrant)
    with pytest.raises(GateTripped, match=r"the gradient of a micro-batch in training mode is .* is not saved"):
        resume(again, *saved, Gate(), lambda done, total: None)
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
    assert measure(training).gradient == ""
    resume(training, *saved, Gate(), lambda done, total: None)


def test_a_dropout_rate_counts_in_the_gradient_alone(tmp_path: Path) -> None:
    training = make(tmp_path)
    first = measure(training)
    training.model[2].p = 0.4
    found = measure(training)
    assert found.sha256 == first.sha256
    assert found.gradient != first.gradient


# ---- health, when a checkpoint is saved and when it is resumed

OBSERVATIONS = torch.cat([torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 0.0]]).repeat(99, 1)])
COLLAPSED = torch.tensor([[7.0, 0.0], [-7.0, 0.0]])


def policy(limits: bool = True, jump: float | None = None) -> Recipe:
    """Two actions, the first of which does nothing, in a hundred known situations."""
    model = nn.Linear(2, 2, bias=False)

    def behave(model: nn.Module) -> dict[str, Any]:
        chances = model(OBSERVATIONS).softmax(1)
        entropy = -(chances * chances.log()).sum(1).mean()
        return {"chances": chances, "entropy": entropy, "noop_rate": (chances.argmax(1) == 0).float().mean()}

    health = {"entropy": Limits(min=0.01), "noop_rate": Limits(max=0.9)} if limits else {}
    return Recipe(
        model=model, data=Points(noise=False), optimizer=torch.optim.SGD(model.parameters(), 0.0), batch_size=4,
        loss=lambda model, batch: model(batch[0][:, :2]).square().mean(), probe=behave,
        health=health | ({"entropy": Limits(jump=jump)} if jump else {}),
    )  # fmt: skip


def set_weights(training: Training, weights: Tensor) -> None:
    with torch.no_grad():
        training.model.weight.copy_(weights)


def save_step(training: Training, store: LocalStore) -> checkpoint.Saved:
    """One more step, saved."""
    train_to(training, training.progress.step + 1)
    return trainings.save_step(training, store)


def resume_from(training: Training, store: LocalStore, saved: checkpoint.Saved, gate: Gate) -> None:
    resume(training, checkpoint.read_saved(store, saved), saved.metadata, gate, lambda done, total: None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


@pytest.mark.parametrize("how", ["exact", "tolerance", "record"])
def test_a_policy_that_had_collapsed_before_there_were_limits_is_not_resumed(
    tmp_path: Path, store: LocalStore, how: Any
) -> None:
    """Entropy and no-op rate of a run that was resumed, all the same, for weeks."""
    legacy = make(tmp_path, "policy", limits=False)
    set_weights(legacy, COLLAPSED)
    saved = save_step(legacy, store)
    assert saved.metadata.probe.values["entropy"] == pytest.approx(1.25e-5, rel=0.1)
    assert saved.metadata.probe.values["noop_rate"] == pytest.approx(0.99)
    resume_from(make(tmp_path, "policy", limits=False), store, saved, Gate(how, 1e-3))
    with pytest.raises(GateTripped, match=r"entropy is 1.2\d*e-05, below 0.01; noop_rate is 0.99, above 0.9") as caught:
        resume_from(make(tmp_path, "policy"), store, saved, Gate(how, 1e-3))
    assert caught.value.data["step"] == 1


def test_a_policy_that_has_collapsed_is_not_saved(tmp_path: Path, store: LocalStore) -> None:
    training = make(tmp_path, "policy")
    healthy = save_step(training, store)
    set_weights(training, COLLAPSED)
    with pytest.raises(Unhealthy, match=r"after step 2 entropy is .* below 0.01; noop_rate .*; nothing was saved"):
        save_step(training, store)
    assert store.list() == [healthy.path]
    resume_from(training, store, healthy, Gate())
    save_step(training, store)


def test_what_is_not_finite_is_not_saved_whatever_the_limits(tmp_path: Path, store: LocalStore) -> None:
    training = make(tmp_path, "policy", limits=False)
    set_weights(training, torch.full((2, 2), math.nan))
    with pytest.raises(Unhealthy, match="entropy is not finite"):
        save_step(training, store)
    assert store.list() == []


def test_a_jump_is_from_the_checkpoint_before_also_from_one_that_was_resumed(tmp_path: Path, store: LocalStore) -> None:
    training, resumed = (make(tmp_path, "policy", limits=False, jump=2.0) for _ in range(2))
    set_weights(training, 3 * COLLAPSED / 7)
    first = save_step(training, store)
    resume_from(resumed, store, first, Gate())
    for each in (training, resumed):
        set_weights(each, torch.zeros(2, 2))
        with pytest.raises(Unhealthy, match=r"entropy is 0.69\d*, more than 2 times 0.017"):
            save_step(each, store)


def test_a_jump_of_what_is_not_above_zero_is_none() -> None:
    assert check_health(Probe(values={"x": -1.0}), {"x": Limits(jump=2)}, Probe(values={"x": -1.0})) == []


def test_limits_are_finite() -> None:
    with pytest.raises(ConfigError, match="finite"):
        Limits(min=math.nan)
