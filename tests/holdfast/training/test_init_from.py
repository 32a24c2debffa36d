"""A new run begins with another run's weights, and takes only the parts of its state that the settings name."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holdfast import Anneal, Recipe, Schedule, checkpoint, state
from holdfast.config import InitFrom
from holdfast.errors import ConfigError, StateError
from holdfast.training import Training, capturing
from holdfast.training.init_from import begin_from
from tests.support import trainings
from tests.support.trainings import Saved, save_state, train_to
from tests.support.varied import Average, Points

pytestmark = pytest.mark.usefixtures("same_process")

STEPS = 4


class Policy(nn.Module):
    """A body and two heads, one of a given width. The name ``head`` is also the beginning of another one's name."""

    def __init__(self, width: int, has_value: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, width)
        self.header = nn.Linear(6, 1)
        if has_value:
            self.value = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(x).mean(1, keepdim=True) + self.header(x)


def actor(width: int = 3, has_value: bool = False, lr: float = 0.02, groups: int = 1) -> Recipe:
    model = Policy(width, has_value)
    average = Average(model)
    anneal = Anneal(1.0, 0.0, start_step=0, end_step=100)
    parameters = list(model.parameters())
    shares = [{"params": parameters}] if groups == 1 else [{"params": parameters[:2]}, {"params": parameters[2:]}]
    chosen = torch.optim.AdamW(shares, lr=lr, weight_decay=0.1 * lr)
    return Recipe(
        model=model, data=Points(noise=False), optimizer=chosen, batch_size=4, after_step=average.update,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), schedule=Schedule("linear", 9),
        extras={"average": average}, anneals={"entropy": anneal},
    )  # fmt: skip


make = functools.partial(trainings.make, recipe=f"{__name__}:actor", seed=2)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    training = make(tmp_path, seed=1)
    train_to(training, STEPS)
    return save_state(training, tmp_path)


def begin(training: Training, saved: Saved, **init: Any) -> Training:
    begin_from(training, *saved, InitFrom(run="other", **init))
    return training


def parts(training: Training) -> dict[str, Any]:
    """Return the present values of the state's components."""
    return state.from_payload(state.to_payload(capturing.capture(training)))  # type: ignore[no-any-return]


def differ(one: Any, other: Any) -> set[str]:
    return set(checkpoint.differences(state.to_payload(one), state.to_payload(other)))


def test_only_weights_and_buffers_are_loaded_by_default(tmp_path: Path, saved: Saved) -> None:
    fresh, training = parts(make(tmp_path)), begin(make(tmp_path), saved, anneal_offset=0)
    found, theirs = parts(training), state.from_payload(saved[0])
    assert differ(found["model"], theirs["model"]) == set()
    assert "body.1.running_mean" in differ(found["model"], fresh["model"])
    assert {name.partition(".")[0] for name in differ(found, fresh)} == {"model"}
    assert training.progress.step == 0


def test_the_optimizer_trains_the_loaded_weights(tmp_path: Path, saved: Saved) -> None:
    """The optimizer's parameters are the loaded ones."""
    training = begin(make(tmp_path), saved)
    train_to(training, 1)
    assert differ(parts(training)["model"], state.from_payload(saved[0])["model"])


@pytest.mark.parametrize(
    ("reset", "kept"),
    [
        (["head"], {"head.weight", "head.bias"}),
        (["head.weight"], {"head.weight"}),
        (["head", "body.1"], {"head.weight", "head.bias", "body.1.weight", "body.1.bias", "body.1.running_mean",
                              "body.1.running_var", "body.1.num_batches_tracked"}),
    ],
)  # fmt: skip
def test_reset_names_stay_as_built(tmp_path: Path, saved: Saved, reset: list[str], kept: set[str]) -> None:
    fresh, theirs = parts(make(tmp_path))["model"], state.from_payload(saved[0])["model"]
    found = parts(begin(make(tmp_path), saved, reset=reset))["model"]
    assert differ({name: found[name] for name in kept}, {name: fresh[name] for name in kept}) == set()
    taken = found.keys() - kept
    assert "header.weight" in taken
    assert differ({name: found[name] for name in taken}, {name: theirs[name] for name in taken}) == set()


@pytest.mark.parametrize("settings", [{"width": 5}, {"has_value": True}, {"width": 5, "has_value": True}])
def test_reset_weights_may_have_another_shape(tmp_path: Path, saved: Saved, settings: dict[str, Any]) -> None:
    reset = ["head"] * ("width" in settings) + ["value"] * ("has_value" in settings)
    fresh = parts(make(tmp_path, **settings))["model"]
    found = parts(begin(make(tmp_path, **settings), saved, reset=reset))["model"]
    different = differ(found, fresh)
    assert {"body.0.weight", "header.weight"} <= different
    assert not [name for name in different if name.startswith(tuple(f"{prefix}." for prefix in reset))]


def test_reset_leaves_out_weights_that_only_the_checkpoint_has(tmp_path: Path) -> None:
    training = make(tmp_path, seed=1, has_value=True)
    train_to(training, 1)
    saved = save_state(training, tmp_path)
    found = parts(begin(make(tmp_path), saved, reset=["value"]))["model"]
    assert differ(found, state.from_payload(saved[0])["model"]) == {"value.weight", "value.bias"}


@pytest.mark.parametrize(
    ("settings", "init", "said", "hint"),
    [
        ({}, {"reset": ["haed"]}, "init_from.reset: the model has no module or weight 'haed'", "did you mean head?"),
        ({}, {"reset": ["hea"]}, "the model has no module or weight 'hea'", "did you mean head?"),
        ({}, {"reset": ["body.7"]}, "the model has no module or weight 'body.7'", "did you mean body."),
        ({"has_value": True}, {}, "the checkpoint has no weight value.bias", 'reset = ["value.bias"] keeps the model'),
        ({"width": 5}, {}, r"head.bias has the shape \(3,\) .* \(5,\)", 'reset = ["head.bias"]'),
        ({"width": 5}, {"reset": ["head.bias"]}, r"head.weight .* \(3, 6\) .* \(5, 6\)", 'reset = ["head.weight"]'),
        (
            {},
            {"extras": ["averaeg"]},
            "init_from.extras: the extra 'averaeg' is missing in the checkpoint or in the recipe",
            "did you mean average?",
        ),
        ({"groups": 2}, {"load_optimizer": True}, r"groups have \[2, 6\] tensors, .* groups have \[8\]", "= false"),
    ],
)  # fmt: skip
def test_a_mismatch_is_refused_by_name(
    tmp_path: Path, saved: Saved, settings: dict[str, Any], init: dict[str, Any], said: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        begin(make(tmp_path, **settings), saved, **init)
    assert hint in caught.value.hint


def test_weights_that_only_the_checkpoint_has_are_refused_by_name(tmp_path: Path) -> None:
    training = make(tmp_path, has_value=True)
    train_to(training, 1)
    with pytest.raises(ConfigError, match=r"the recipe's model has no weight value.bias"):
        begin(make(tmp_path), save_state(training, tmp_path))


def test_a_refusal_leaves_the_model_unchanged(tmp_path: Path, saved: Saved) -> None:
    training = make(tmp_path, width=5)
    before = state.to_payload(parts(training))
    with pytest.raises(ConfigError):
        begin(training, saved)
    assert checkpoint.differences(before, state.to_payload(capturing.capture(training))) == []


def test_load_optimizer_loads_moments_and_no_hyperparameters(tmp_path: Path, saved: Saved) -> None:
    fresh = parts(make(tmp_path, lr=0.005))
    training = begin(make(tmp_path, lr=0.005), saved, load_optimizer=True)
    found, theirs = parts(training)["optimizer"], state.from_payload(saved[0])["optimizer"]
    assert found["state"].keys() == {name for name, _ in training.model.named_parameters()}
    assert differ(found["state"], theirs["state"]) == set()
    assert differ(found["param_groups"], fresh["optimizer"]["param_groups"]) == set()
    assert training.lrs == [0.005]
    assert differ(parts(training)["built"], fresh["built"]) == set()
    train_to(training, 1)
    assert training.optimizer.state[next(training.model.parameters())]["step"] == STEPS + 1


def test_reset_weights_get_no_moments(tmp_path: Path, saved: Saved) -> None:
    training = begin(make(tmp_path, width=5), saved, load_optimizer=True, reset=["head"])
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    known = {names[id(parameter)] for parameter in training.optimizer.state}
    assert names.keys() - {id(parameter) for parameter in training.optimizer.state}
    assert set(names.values()) - known == {"head.weight", "head.bias"}
    train_to(training, 1)
    steps = {names[id(parameter)]: int(moments["step"]) for parameter, moments in training.optimizer.state.items()}
    assert (steps["head.weight"], steps["header.weight"]) == (1, STEPS + 1)


def test_only_named_extras_are_loaded(tmp_path: Path, saved: Saved) -> None:
    fresh, theirs = parts(make(tmp_path))["extras"], state.from_payload(saved[0])["extras"]
    assert differ(parts(begin(make(tmp_path), saved))["extras"], fresh) == set()
    assert differ(parts(begin(make(tmp_path), saved, extras=["average"]))["extras"], theirs) == set()


def test_an_extra_that_does_not_fit_is_named(tmp_path: Path, saved: Saved) -> None:
    with pytest.raises(StateError, match="the saved extra average doesn't fit"):
        begin(make(tmp_path, width=5), saved, reset=["head"], extras=["average"])


@pytest.mark.parametrize(("given", "offset"), [(None, STEPS), (0, 0), (30, 30)])
def test_anneals_continue_or_begin_at_a_given_offset(
    tmp_path: Path, saved: Saved, given: int | None, offset: int
) -> None:
    training = begin(make(tmp_path), saved, anneal_offset=given)
    assert training.progress.anneal_offset == offset
    assert training.set_anneals() == {"entropy": 1 - offset / 100}
    train_to(training, 2)
    assert training.recipe.anneals["entropy"].value == pytest.approx(1 - (offset + 1) / 100)
    assert training.lrs == [0.02 * Schedule("linear", 9).factor(2, training.steps_per_epoch)]


def test_anneal_offsets_add_up_over_generations_of_runs(tmp_path: Path, saved: Saved) -> None:
    child = begin(make(tmp_path), saved)
    train_to(child, 3)
    payload, metadata = save_state(child, tmp_path / "child")
    assert (metadata.anneal_offset, metadata.anneals) == (STEPS, {"entropy": 1 - (STEPS + 3) / 100})
    assert begin(make(tmp_path), (payload, metadata)).progress.anneal_offset == STEPS + 3
