"""Health is checked at every save and every resume."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Limits, Recipe, checkpoint
from holdfast.errors import GateTripped, Unhealthy
from holdfast.store.local import LocalStore
from holdfast.training import Gate, Training, resume
from tests.support import trainings
from tests.support.trainings import train_to
from tests.support.varied import Points

pytestmark = pytest.mark.usefixtures("same_process")


def make(folder: Path, **settings: Any) -> Training:
    return trainings.make(folder, f"{__name__}:policy", **settings)


OBSERVATIONS = torch.tensor([[-1.0, 0.0]] + 62 * [[1.0, 0.0]] + 37 * [[1.0, 1.0]])
COLLAPSED = torch.tensor([[7.0, 0.0], [-7.0, 0.0]])
HEALTHY = torch.tensor([[1.0, -2.0], [0.0, 0.0], [0.0, 0.0]])


def policy(limits: bool = True, jump: float | None = None, actions: int = 2) -> Recipe:
    """Build a policy of some actions, the first of which does nothing, and probe it in a hundred fixed situations."""
    model = nn.Linear(2, actions, bias=False)

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
    """Train one more step and save it."""
    train_to(training, training.progress.step + 1)
    return trainings.save_step(training, store)


def resume_from(training: Training, store: LocalStore, saved: checkpoint.Saved, gate: Gate) -> None:
    resume(training, checkpoint.read_saved(store, saved), saved.metadata, gate, lambda done, total: None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


@pytest.mark.parametrize("how", ["exact", "tolerance", "record"])
def test_a_collapsed_policy_saved_without_limits_is_not_resumed_with_limits(
    tmp_path: Path, store: LocalStore, how: Any
) -> None:
    """The entropy and the no-op rate are those of a real run that was resumed for weeks in spite of them."""
    legacy = make(tmp_path, limits=False)
    set_weights(legacy, COLLAPSED)
    saved = save_step(legacy, store)
    assert saved.metadata.probe.values["entropy"] == pytest.approx(1.25e-5, rel=0.1)
    assert saved.metadata.probe.values["noop_rate"] == pytest.approx(0.99)
    resume_from(make(tmp_path, limits=False), store, saved, Gate(how, 1e-3))
    with pytest.raises(GateTripped, match=r"entropy is 1.2\d*e-05, below 0.01; noop_rate is 0.99, above 0.9") as caught:
        resume_from(make(tmp_path), store, saved, Gate(how, 1e-3))
    assert caught.value.data["step"] == 1


@pytest.mark.parametrize("how", ["exact", "tolerance", "record"])
def test_a_healthy_policy_is_saved_and_resumed(tmp_path: Path, store: LocalStore, how: Any) -> None:
    """Entropy and no-op rate are those of a real run, too."""
    training = make(tmp_path, actions=3)
    set_weights(training, HEALTHY)
    saved = save_step(training, store)
    assert saved.metadata.probe.values["entropy"] == pytest.approx(0.99, abs=0.005)
    assert saved.metadata.probe.values["noop_rate"] == pytest.approx(0.62)
    resumed = make(tmp_path, actions=3)
    resume_from(resumed, store, saved, Gate(how, 1e-3))
    save_step(resumed, store)


def test_a_collapsed_policy_is_not_saved(tmp_path: Path, store: LocalStore) -> None:
    training = make(tmp_path)
    healthy = save_step(training, store)
    set_weights(training, COLLAPSED)
    with pytest.raises(Unhealthy, match=r"after step 2 entropy is .* below 0.01; noop_rate .*; nothing was saved"):
        save_step(training, store)
    assert store.list() == [healthy.path]
    resume_from(training, store, healthy, Gate())
    save_step(training, store)


def test_a_probe_that_is_not_finite_prevents_a_save_without_limits(tmp_path: Path, store: LocalStore) -> None:
    training = make(tmp_path, limits=False)
    set_weights(training, torch.full((2, 2), math.nan))
    with pytest.raises(Unhealthy, match="entropy is not finite"):
        save_step(training, store)
    assert store.list() == []


def test_a_jump_is_measured_from_the_checkpoint_before_even_across_a_resume(tmp_path: Path, store: LocalStore) -> None:
    training, resumed = (make(tmp_path, limits=False, jump=2.0) for _ in range(2))
    set_weights(training, 3 * COLLAPSED / 7)
    first = save_step(training, store)
    resume_from(resumed, store, first, Gate())
    for each in (training, resumed):
        set_weights(each, torch.zeros(2, 2))
        with pytest.raises(Unhealthy, match=r"entropy is 0.69\d*, more than 2 times 0.017"):
            save_step(each, store)
