"""The merge of changed hyperparameters into a restored state.

Loading an optimizer's or a scheduler's state also restores the hyperparameters that it was saved with, so a changed
setting that ``accept_drift`` allows would silently have no effect. Therefore a checkpoint also contains the
hyperparameters as the recipe built them. If the recipe now builds a different value, a person has changed this value,
and the new value is applied. Everything else stays as restored.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from holdfast.state import from_payload, to_payload
from holdfast.training.build import Training

# Attributes in which a scheduler keeps its progress; they aren't settings.
DYNAMIC = (
    "last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "_last_lr", "_step_count", "_is_initial",
    "_get_lr_called_within_step", "_schedulers", "T_cur", "T_i",
)  # fmt: skip


def take_over(training: Training, saved_built: dict[str, Any]) -> list[str]:
    """Apply the hyperparameters that the recipe now builds with different values than at the save. Return their names.

    A learning rate keeps its progress along its schedule: it is multiplied by the new base rate / the old base rate.

    Args:
        saved_built: the result of `copy_built` in the checkpoint.
    """
    # Convert the values as a save and a load do: a Counter, for example, becomes a dict.
    built = from_payload(to_payload(training.as_built.hyperparameters))
    changed = []
    rates = [_rates(scheduler) for scheduler in training.schedulers]
    # Groups that a step has added aren't in the built state, so `zip` skips them: they stay as restored.
    groups = zip(training.optimizer.param_groups, saved_built["optimizer"], built["optimizer"], strict=False)
    for number, (group, old, new) in enumerate(groups):
        changed += [f"optimizer.{number}.{name}" for name in _merge_group(group, old, new)]
    for number, scheduler in enumerate(training.schedulers):
        old, new = saved_built["schedulers"][number], built["schedulers"][number]
        base = [group.get("initial_lr", group["lr"]) for group in _groups_of(scheduler)]
        changed += [f"schedulers.{number}.{name}" for name in _merge_scheduler(scheduler, old, new, base)]
    if saved_built["schedule"] != built["schedule"]:
        changed.append("schedule")
    if changed:
        _recompute(training)
        for scheduler, was in zip(training.schedulers, rates, strict=True):
            _scale_last_rates([scheduler], was, _rates(scheduler))
    return changed


def _merge_scheduler(scheduler: Any, old: dict[str, Any], new: dict[str, Any], base: list[float]) -> list[str]:
    """Apply the new settings to a scheduler and its inner schedulers. Return the names of the changed settings."""
    if getattr(scheduler, "base_lrs", base) != base:
        scheduler.base_lrs = list(base)
    changed = _changed(old, new)
    for name in changed:
        setattr(scheduler, name, new[name])
    inner = zip(
        getattr(scheduler, "_schedulers", ()), old.get("_schedulers", ()), new.get("_schedulers", ()), strict=True
    )
    for number, (each, was, now) in enumerate(inner):
        changed += [f"{number}.{name}" for name in _merge_scheduler(each, was, now, base)]
    return changed


def _merge_group(group: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    changed = [name for name in new if name != "lr" and not _same(old.get(name), new[name])]
    for name in changed:
        group[name] = new[name]
    rate = "initial_lr" if "initial_lr" in new and "initial_lr" in old else "lr"
    if not _same(old[rate], new[rate]):
        group["lr"] = group["lr"] * (new[rate] / old[rate]) if old[rate] else new["lr"]
        changed.append("lr")
    return changed


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name, value in new.items() if name not in DYNAMIC and not _same(old.get(name), value)]


def _recompute(training: Training) -> None:
    """Compute each `LambdaLR`'s rates anew, with its present functions, if its optimizer has no other scheduler."""
    for scheduler in training.schedulers:
        is_alone = [each.optimizer for each in training.schedulers].count(scheduler.optimizer) == 1
        if is_alone and isinstance(scheduler, LambdaLR):
            groups = _groups_of(scheduler)
            for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                group["lr"] = base * factor(scheduler.last_epoch)


def _groups_of(scheduler: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
    return groups


def _rates(scheduler: Any) -> list[Any]:
    return copy.deepcopy([group["lr"] for group in _groups_of(scheduler)])


def _scale_last_rates(schedulers: Iterable[Any], old: list[Any], new: list[Any]) -> None:
    """Multiply each rate in a scheduler's ``_last_lr`` by the ratio of its group's new rate to the old rate."""
    for scheduler in schedulers:
        if len(last := getattr(scheduler, "_last_lr", ())) == len(old):
            each = zip(last, old, new, strict=True)
            scheduler._last_lr = [now if rate == was or not was else rate * (now / was) for rate, was, now in each]
        _scale_last_rates(getattr(scheduler, "_schedulers", ()), old, new)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)
