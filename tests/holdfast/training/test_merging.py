"""A hyperparameter that was changed on purpose is in force from the next step on, and everything else stays."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, StepLR

from holdfast import Recipe, Schedule, checkpoint, state
from holdfast.training import Training, capturing, merging
from tests.support import trainings
from tests.support.trainings import train_to
from tests.support.varied import Points

pytestmark = pytest.mark.usefixtures("same_process")

STEPS_PER_EPOCH = 6
SCHEDULES = ("none", "linear", "step", "cosine", "plateau")
# In a warm-up, after it, at a step at which StepLR has just halved, at the end of an epoch.
MOMENTS = (1, 4, 5, 6)


def build_schedule(
    name: str, optimizer: Any, length: int, gamma: float, start_factor: float, warmup: int, scale: float
) -> Any:
    if name == "linear":
        return Schedule("linear", epochs=length, warmup_steps=warmup, final_lr_scale=scale)
    if name == "step":
        return StepLR(optimizer, step_size=5, gamma=gamma)
    if name == "cosine":
        return CosineAnnealingLR(optimizer, T_max=length * STEPS_PER_EPOCH)
    if name == "plateau":
        warmup_lr = LinearLR(optimizer, start_factor=start_factor, total_iters=4)
        return [warmup_lr, ReduceLROnPlateau(optimizer, factor=gamma, patience=0, threshold=0.5)]
    return None


def grouped(
    optimizer: str = "adamw", schedule: str = "linear", lr: float = 0.02, weight_decay: float = 0.1, beta: float = 0.9,
    length: int = 3, gamma: float = 0.5, start_factor: float = 0.1, warmup: int = 2, scale: float = 0.1,
) -> Recipe:  # fmt: skip
    """Build two groups. The second has a lower rate and no weight decay, whatever the settings."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": lr / 2, "weight_decay": 0.0}]
    if optimizer == "adamw":
        chosen: Any = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, betas=(beta, 0.99))
    else:
        chosen = torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay, momentum=beta)
    return Recipe(
        model=model, data=Points(noise=False), optimizer=chosen, batch_size=4, steps_per_epoch=STEPS_PER_EPOCH,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        schedule=build_schedule(schedule, chosen, length, gamma, start_factor, warmup, scale),
    )  # fmt: skip


make = functools.partial(trainings.make, recipe=f"{__name__}:grouped")


def captured(training: Training) -> checkpoint.Payload:
    """Return the state that the next step depends on."""
    return state.to_payload(copy.deepcopy(capturing.capture(training)))


def rates(training: Training, stop: int) -> list[list[float]]:
    """Train on and return the rates of each step."""
    found = []
    while training.progress.step < stop:
        found.append(training.lrs)
        train_to(training, training.progress.step + 1)
    return found


def take_over(
    folder: Path, step: int, old: dict[str, Any], new: dict[str, Any]
) -> tuple[Training, list[str], list[str]]:
    """Restore the state of a training with old settings into one with new settings, and take the new ones over.

    Returns: the training, the names that were taken over, and the names of the state's values that have changed,
        except the last rates that schedulers report.
    """
    before, after = make(folder, **old), make(folder, **old | new)
    train_to(before, step)
    saved = state.from_payload(captured(before))
    capturing.restore(after, saved)
    names = merging.take_over(after, saved["built"])
    changed = [
        name
        for name in checkpoint.differences(captured(before), captured(after))
        if not name.startswith("built.") and "_last_lr" not in name
    ]
    return after, names, changed


def assert_same_rates(found: list[list[float]], expected: list[list[float]], rel: float = 1e-9) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-15)


def of_groups(name: str, *numbers: int) -> list[str]:
    return [f"optimizer.{number}.{name}" for number in numbers or (0, 1)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", MOMENTS)
def test_equal_settings_change_nothing(tmp_path: Path, optimizer: str, schedule: str, step: int) -> None:
    assert take_over(tmp_path, step, {"optimizer": optimizer, "schedule": schedule}, {})[1:] == ([], [])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", MOMENTS)
def test_a_changed_rate_keeps_the_progress_along_its_schedule(
    tmp_path: Path, optimizer: str, schedule: str, step: int
) -> None:
    settings = {"optimizer": optimizer, "schedule": schedule}
    training, names, changed = take_over(tmp_path, step, settings, {"lr": 0.005})
    rate_names, places = of_groups("lr"), ["optimizer.param_groups.0.lr", "optimizer.param_groups.1.lr"]
    if schedule != "none":
        rate_names += of_groups("initial_lr")
        places += [name.replace("lr", "initial_lr") for name in places]
        places += ["schedulers.0.base_lrs.0", "schedulers.0.base_lrs.1"]
    assert (sorted(names), changed) == (sorted(rate_names), sorted(places))
    straight = make(tmp_path, **settings, lr=0.005)
    train_to(straight, step)
    # At the end of the epoch the plateau scheduler compares the losses, which differ.
    stop = STEPS_PER_EPOCH if schedule == "plateau" else 3 * STEPS_PER_EPOCH
    expected = rates(straight, stop)
    if schedule == "linear":
        assert rates(training, stop) == expected
    else:
        assert_same_rates(rates(training, stop), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weight_decay_changes_only_in_the_groups_that_use_the_setting(tmp_path: Path, schedule: str) -> None:
    training, names, changed = take_over(tmp_path, 4, {"schedule": schedule}, {"weight_decay": 0.3})
    assert (names, changed) == (of_groups("weight_decay", 0), ["optimizer.param_groups.0.weight_decay"])
    assert [group["weight_decay"] for group in training.optimizer.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_momentum_changes_and_moments_stay(tmp_path: Path, optimizer: str) -> None:
    training, names, changed = take_over(tmp_path, 4, {"optimizer": optimizer}, {"beta": 0.5})
    name = "betas" if optimizer == "adamw" else "momentum"
    assert names == of_groups(name)
    assert {place.removesuffix(".0").rpartition(".")[2] for place in changed} == {name}
    assert [group[name] for group in training.optimizer.param_groups] == [(0.5, 0.99) if name == "betas" else 0.5] * 2


@pytest.mark.parametrize("setting", [{"length": 5}, {"scale": 0.5}, {"warmup": 5}, {"warmup": 0}])
@pytest.mark.parametrize("step", MOMENTS)
def test_rates_follow_a_new_schedule_as_from_the_first_step(tmp_path: Path, step: int, setting: dict[str, Any]) -> None:
    straight = make(tmp_path, **setting)
    train_to(straight, step)
    training, names, changed = take_over(tmp_path, step, {}, setting)
    assert names == ["schedule"]
    assert set(changed) <= {"optimizer.param_groups.0.lr", "optimizer.param_groups.1.lr"}
    assert rates(training, 30) == rates(straight, 30)


def test_rates_follow_a_new_schedule_and_a_new_rate_at_once(tmp_path: Path) -> None:
    setting = {"lr": 0.005, "length": 5}
    straight = make(tmp_path, **setting)
    train_to(straight, 4)
    training, names, _ = take_over(tmp_path, 4, {}, setting)
    assert sorted(names) == sorted([*of_groups("lr"), *of_groups("initial_lr"), "schedule"])
    assert rates(training, 30) == rates(straight, 30)


@pytest.mark.parametrize("step", MOMENTS)
def test_a_new_gamma_applies_from_the_next_decay(tmp_path: Path, step: int) -> None:
    training, names, changed = take_over(tmp_path, step, {"schedule": "step"}, {"gamma": 0.1})
    assert (names, changed) == (["schedulers.0.gamma"], ["schedulers.0.gamma"])
    now = 0.02 * (0.5 if step >= 5 else 1)
    expected = [now * 0.1 ** (each // 5 - step // 5) for each in range(step, 16)]
    assert_same_rates(rates(training, 16), [[rate, rate / 2] for rate in expected])


@pytest.mark.parametrize("step", MOMENTS)
def test_a_cosine_of_a_new_length_continues_from_the_current_rate(tmp_path: Path, step: int) -> None:
    """torch computes a rate from the one before, so the new curve keeps the ratio to the full curve."""
    straight = make(tmp_path, schedule="cosine", length=5)
    train_to(straight, step)
    training, names, changed = take_over(tmp_path, step, {"schedule": "cosine"}, {"length": 5})
    assert (names, changed) == (["schedulers.0.T_max"], ["schedulers.0.T_max"])
    ratio = training.lrs[0] / straight.lrs[0]
    assert ratio < 1
    expected = [[ratio * rate for rate in step_rates] for step_rates in rates(straight, 29)]
    assert_same_rates(rates(training, 29), expected, rel=1e-6)


def test_a_plateau_keeps_its_count_and_its_best_loss(tmp_path: Path) -> None:
    training, names, changed = take_over(tmp_path, 13, {"schedule": "plateau"}, {"gamma": 0.1})
    assert (names, changed) == (["schedulers.1.factor"], ["schedulers.1.factor"])
    assert training.schedulers[1].best < 1e9
    before = training.lrs
    training.progress.epoch_loss_sum = 1e9  # no epoch was ever worse
    train_to(training, 18)
    assert_same_rates([training.lrs], [[0.1 * rate for rate in before]])


def test_a_finished_warm_up_does_not_begin_again(tmp_path: Path) -> None:
    training, names, _ = take_over(tmp_path, 5, {"schedule": "plateau"}, {"start_factor": 0.5})
    assert names == ["schedulers.0.start_factor"]
    assert_same_rates(rates(training, 6), [[0.02, 0.01]])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_next_checkpoint_records_the_new_hyperparameters_as_built(tmp_path: Path, schedule: str) -> None:
    """Otherwise the next resume would take them over, and scale the rate, once more."""
    training, names, _ = take_over(tmp_path, 4, {"schedule": schedule}, {"lr": 0.005, "weight_decay": 0.3})
    assert names
    train_to(training, 5)
    saved = state.from_payload(captured(training))
    again = make(tmp_path, schedule=schedule, lr=0.005, weight_decay=0.3)
    capturing.restore(again, saved)
    assert merging.take_over(again, saved["built"]) == []
    assert again.lrs == training.lrs


@pytest.mark.parametrize("schedule", ["linear", "step", "cosine", "plateau"])
@pytest.mark.parametrize("step", MOMENTS)
def test_schedulers_report_the_rate_in_force(tmp_path: Path, schedule: str, step: int) -> None:
    training, _, _ = take_over(tmp_path, step, {"schedule": schedule}, {"lr": 0.005})
    assert training.schedulers[0].get_last_lr() == training.lrs
    straight = make(tmp_path, schedule=schedule, lr=0.005)
    train_to(straight, step)
    last = [[scheduler.get_last_lr() for scheduler in each.schedulers] for each in (training, straight)]
    assert_same_rates(*last)


def test_schedulers_report_the_rate_of_a_new_schedule(tmp_path: Path) -> None:
    training, _, _ = take_over(tmp_path, 4, {}, {"length": 5})
    assert training.schedulers[0].get_last_lr() == training.lrs


def test_a_rate_of_zero_can_be_raised(tmp_path: Path) -> None:
    training, _, _ = take_over(tmp_path, 3, {"lr": 0.0, "schedule": "none"}, {"lr": 0.01})
    assert training.lrs == [0.01, 0.005]
