"""The schedulers of a recipe or a loop: torch's schedulers, and Holdfast's `Schedule`, one for each optimizer."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from holdfast.config import did_you_mean
from holdfast.errors import RecipeError
from holdfast.recipe import Recipe
from holdfast.schedule import Schedule
from holdfast.training.kept import Kept
from holdfast.training.optimizers import Optimizers


class Schedulers(list[Any]):
    """The torch schedulers of a training, in the order in which a checkpoint lists them.

    Attributes:
        names: the name of each scheduler, such as ``linear`` for a `Schedule`.
    """

    def __init__(self, recipe: Recipe, steps_per_epoch: int) -> None:
        """
        Raises:
            RecipeError: a schedule's name isn't the name of an optimizer, or there are several optimizers and a
                `Schedule` has no name.
        """
        pairs = list(_list_schedules(recipe))
        self.names = [each.name if isinstance(each, Schedule) else type(each).__name__ for each, _ in pairs]
        super().__init__(
            each.build(optimizer, steps_per_epoch) if isinstance(each, Schedule) else each for each, optimizer in pairs
        )

    def describe(self) -> list[str]:
        """Return each scheduler's name and its count of steps or epochs, such as ``linear at step 40``."""
        units = ["epoch" if waits_for_plateau(scheduler) else "step" for scheduler in self]
        # torch's `last_epoch` counts the calls of step()
        counts = [getattr(scheduler, "last_epoch", None) for scheduler in self]
        described = zip(self.names, units, counts, strict=True)
        return [name if count is None else f"{name} at {unit} {count}" for name, unit, count in described]

    def step(self) -> None:
        """Step the schedulers that are stepped after each training step."""
        for scheduler in self:
            if not waits_for_plateau(scheduler):
                scheduler.step()

    def end_epoch(self, loss: float | None) -> None:
        """Step the schedulers that need the epoch's loss.

        If there is no loss, because all steps were skipped, no scheduler steps.
        """
        for scheduler in self:
            if waits_for_plateau(scheduler) and loss is not None:
                scheduler.step(loss)


def _list_schedules(recipe: Recipe) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a torch scheduler or a `Schedule`, and its optimizer (None for a loop's scheduler)."""
    if isinstance(recipe, Kept):
        yield from ((each, None) for each in recipe.schedulers)
        return
    optimizer: Any = recipe.optimizer
    for name, schedules in name_schedules(recipe).items():
        if name and (not isinstance(optimizer, Optimizers) or name not in optimizer.parts):
            known = optimizer.parts if isinstance(optimizer, Optimizers) else {}
            raise RecipeError(f"Recipe(schedule=...): there is no optimizer {name!r}", hint=did_you_mean(name, known))
        own = optimizer.parts[name] if name else optimizer
        for each in schedules if isinstance(schedules, Sequence) else [schedules]:
            if isinstance(each, Schedule) and isinstance(own, Optimizers):
                raise RecipeError(
                    "Recipe(schedule=...): the recipe has several optimizers, and a single Schedule doesn't say for "
                    "which it is",
                    hint=f'schedule={{"{next(iter(own.parts))}": Schedule(...), ...}}',
                )
            yield each, own


def name_schedules(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's schedules by their optimizers' names; the name is "" for a schedule that has no name."""
    schedule = recipe.schedule
    if isinstance(schedule, Mapping):
        return dict(sorted(schedule.items()))
    return {} if schedule is None else {"": schedule}


def describe_schedules(recipe: Recipe) -> Any:
    """Return the arguments of the recipe's `Schedule`, or of each `Schedule` by its name; None without a `Schedule`."""
    found = {
        name: dataclasses.asdict(each) for name, each in name_schedules(recipe).items() if isinstance(each, Schedule)
    }
    return found.get("", found or None)


def copy_built(optimizer: Any, schedulers: Sequence[Any], recipe: Recipe) -> dict[str, Any]:
    """Return the hyperparameters as the recipe built them, before any step, for `merging.take_over`."""
    return copy.deepcopy(
        {
            "optimizer": [
                {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
            ],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "schedule": describe_schedules(recipe),
        }
    )


def waits_for_plateau(scheduler: Any) -> bool:
    """Return whether the scheduler is stepped at the end of an epoch, with the epoch's loss."""
    return isinstance(scheduler, ReduceLROnPlateau)
