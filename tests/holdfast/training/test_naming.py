"""An optimizer's state is matched to parameters by name, in whatever order the recipe builds them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Recipe, checkpoint, state
from holdfast.errors import GateTripped, StateError
from holdfast.training import Gate, Training, capturing, naming, resume
from tests.support import trainings
from tests.support.trainings import Saved, save_state, train_to

pytestmark = pytest.mark.usefixtures("same_process")

STEPS = 3
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda groups: torch.optim.Adam(groups, 0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, 0.01, momentum=0.9),
    "lbfgs": lambda groups: Flat([each for group in groups for each in group["params"]]),
}


class Flat(torch.optim.LBFGS):
    """An L-BFGS that is stepped without a closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step(lambda: 0.0)


class Loose:
    """A parameter without a module, as an extra."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._parameter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._parameter.data.copy_(state["value"])


def several(optimizer: str = "adam", loose: bool = False) -> Recipe:
    """Build four layers of one shape. ORDER is their order in the optimizer, and GROUP the members of the first group.

    Args:
        loose: whether the optimizer also has a parameter outside the model, and those of a second module.
    """
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    critic, scale = nn.Linear(4, 1), nn.Parameter(torch.ones(()))
    order, group = os.environ.get("ORDER", "0123"), os.environ.get("GROUP", "01")
    first, second = ([model[int(each)] for each in order if (each in group) is is_first] for is_first in (True, False))
    others = [*critic.parameters(), scale] if loose else []

    def loss(model: Any, x: Tensor) -> Tensor:
        for layer in model:
            x = x + layer(x).tanh()
        return (critic(x) * scale).square().mean() if loose else x.square().mean()

    return Recipe(
        model=model, data=list(torch.randn(8, 4, generator=torch.Generator().manual_seed(1))), batch_size=2, loss=loss,
        optimizer=OPTIMIZERS[optimizer](
            [{"params": [p for each in layers for p in each.parameters()]} for layers in (first, second)]
            + ([{"params": others}] if others else [])
        ),
        extras={"critic": critic, "scale": Loose(scale)} if loose else {},
    )  # fmt: skip


def make(folder: Path, **settings: Any) -> Training:
    return trainings.make(folder, f"{__name__}:several", **settings)


def resumed(folder: Path, saved: Saved, **settings: Any) -> Training:
    training = make(folder, **settings)
    resume(training, *saved, Gate(), lambda done, total: None)
    return training


def trained(folder: Path, **settings: Any) -> tuple[Training, Saved]:
    training = make(folder, **settings)
    train_to(training, STEPS)
    return training, save_state(training, folder)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_another_order_of_parameters_ends_on_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    straight, saved = trained(tmp_path, optimizer=optimizer)
    train_to(straight, 2 * STEPS)
    monkeypatch.setenv("ORDER", "3210")
    other = resumed(tmp_path, saved, optimizer=optimizer)
    train_to(other, 2 * STEPS)
    assert checkpoint.differences(*(state.to_payload(capturing.capture(each)) for each in (straight, other))) == []


def test_a_parameter_in_another_group_trips_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saved = trained(tmp_path)
    monkeypatch.setenv("GROUP", "02")
    with pytest.raises(GateTripped) as caught:
        resumed(tmp_path, saved)
    places = ["0.params.2", "0.params.3", "1.params.0", "1.params.1"]
    assert caught.value.data["different"] == [f"optimizer.param_groups.{place}" for place in places]


def test_another_order_trips_the_gate_if_the_optimizer_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L-BFGS keeps one flat history of all its parameters."""
    _, saved = trained(tmp_path, optimizer="lbfgs")
    resumed(tmp_path, saved, optimizer="lbfgs")
    monkeypatch.setenv("ORDER", "1032")
    with pytest.raises(GateTripped, match=r"optimizer.param_groups.0.params.0"):
        resumed(tmp_path, saved, optimizer="lbfgs")


def test_parameters_outside_the_model_have_names(tmp_path: Path) -> None:
    training, saved = trained(tmp_path, loose=True)
    names = naming.name_parameters(training)
    assert (names[0], names[-3:]) == ("0.weight", ["extras.critic.weight", "extras.critic.bias", "2.2"])
    assert set(saved[0].tree["optimizer"]["state"]) == set(names)


def test_an_earlier_versions_numbered_state_is_resumed(tmp_path: Path) -> None:
    straight, (_, metadata) = trained(tmp_path)
    earlier = capturing.capture(straight) | {"optimizer": straight.optimizer.state_dict()}
    payload = checkpoint.deserialize([bytearray(b"".join(map(bytes, checkpoint.serialize(state.to_payload(earlier)))))])
    assert payload.tree["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]
    train_to(straight, 2 * STEPS)
    other = resumed(tmp_path, (payload, metadata))
    train_to(other, 2 * STEPS)
    assert checkpoint.differences(*(state.to_payload(capturing.capture(each)) for each in (straight, other))) == []


@pytest.mark.parametrize(("saved", "built"), [("0123", "012"), ("012", "0123")])
def test_a_parameter_missing_on_one_side_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, built: str
) -> None:
    monkeypatch.setenv("ORDER", saved)
    _, found = trained(tmp_path)
    monkeypatch.setenv("ORDER", built)
    with pytest.raises(StateError, match=r"the saved optimizer doesn't fit .* has no parameter 3.bias"):
        resumed(tmp_path, found)
