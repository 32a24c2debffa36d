"""Hyperparameters that a person has changed on purpose, in a state that still has the old ones.

Loading an optimizer's or a scheduler's state brings back the learning rate that it was saved with: a changed setting,
let through by ``accept_drift``, would have no effect, silently. So a checkpoint also keeps the hyperparameters *as they
were built*; where what is built now differs from that, it is what the person wants. Nothing else is touched.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from holdfast.state import from_payload, to_payload
from holdfast.training.build import Training

# A scheduler's own bookkeeping, not a setting.
DYNAMIC = (
    "last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "_last_lr", "_step_count", "_is_initial",
    "_get_lr_called_within_step", "_schedulers", "T_cur", "T_i",
)  # fmt: skip


def take_over(training: Training, saved_built: dict[str, Any]) -> list[str]:
    """Hyperparameters that the recipe builds otherwise than it did are in force; their names.

    A learning rate keeps where its schedule has brought it: it is scaled as the base rate was.

    Args:
        saved_built: what `describe_built` gave when the checkpoint was written.
    """
    built = from_payload(to_payload(training.built))  # as it would be read back: a Counter as a dict
    changed = []
    rates = _rates(training)
    for number, group in enumerate(training.optimizer.param_groups):
        old, new = saved_built["optimizer"][number], built["optimizer"][number]
        changed += [f"optimizer.{number}.{name}" for name in _merge_group(group, old, new)]
    for number, scheduler in enumerate(training.schedulers):
        old, new = saved_built["schedulers"][number], built["schedulers"][number]
        base = [group.get("initial_lr", group["lr"]) for group in training.optimizer.param_groups]
        changed += [f"schedulers.{number}.{name}" for name in _merge_scheduler(scheduler, old, new, base)]
    if saved_built["schedule"] != built["schedule"]:
        changed.append("schedule")
    if changed:
        _recompute(training)
        _scale_last_rates(training.schedulers, rates, _rates(training))
    return changed


def _merge_scheduler(scheduler: Any, old: dict[str, Any], new: dict[str, Any], base: list[float]) -> list[str]:
    """The scheduler, and those that it is made of, have the new settings; their names."""
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
    """Rates that are a function of the step follow the new function from the very next step on."""
    if len(training.schedulers) == 1 and isinstance(scheduler := training.schedulers[0], LambdaLR):
        groups = training.optimizer.param_groups
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)


def _rates(training: Training) -> list[Any]:
    return copy.deepcopy([group["lr"] for group in training.optimizer.param_groups])


def _scale_last_rates(schedulers: Iterable[Any], old: list[Any], new: list[Any]) -> None:
    """Change the rates that schedulers report as their last as the groups' rates have changed."""
    for scheduler in schedulers:
        if len(last := getattr(scheduler, "_last_lr", ())) == len(old):
            each = zip(last, old, new, strict=True)
            scheduler._last_lr = [now if rate == was or not was else rate * (now / was) for rate, was, now in each]
        _scale_last_rates(getattr(scheduler, "_schedulers", ()), old, new)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)
