"""Learning rates depend on the step alone."""

import pytest
import torch

from holdfast import Schedule
from holdfast.errors import ConfigError


def rates(schedule: Schedule, steps: int = 20, steps_per_epoch: int = 5) -> list[float]:
    return [round(schedule.factor(step, steps_per_epoch), 4) for step in range(steps)]


def test_linear_falls_to_its_end_and_stays() -> None:
    found = rates(Schedule("linear", epochs=2, final_lr_scale=0.5), 13)
    assert found == [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.5, 0.5]


def test_cosine_falls_along_a_half_wave() -> None:
    assert rates(Schedule("cosine", epochs=2, final_lr_scale=0.1), 13)[::5] == [1.0, 0.55, 0.1]


def test_step_multiplies_by_gamma() -> None:
    assert rates(Schedule("step", step_size=2, gamma=0.5), 21)[::5] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_constant_rises_in_the_warmup_and_stays() -> None:
    assert rates(Schedule("constant", warmup_steps=3), 5) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_fall_begins_when_the_warmup_ends() -> None:
    assert rates(Schedule("linear", epochs=1, warmup_steps=1), 6) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("name", ["linear", "cosine", "step", "constant"])
def test_the_torch_scheduler_follows_the_factor(name: str) -> None:
    schedule = Schedule(name, epochs=3, warmup_steps=4, final_lr_scale=0.1)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([{"params": torch.zeros(1, requires_grad=True)}], lr=0.2)
    scheduler = schedule.build(optimizer, 5)
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == 0.2 * schedule.factor(step, 5)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    "wrong", [{"name": "linaer"}, {"epochs": 0}, {"step_size": -1}, {"warmup_steps": -1}, {"epochs": float("nan")}]
)
def test_wrong_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Schedule(**wrong)  # type: ignore[arg-type]
