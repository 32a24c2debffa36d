"""The steps of events such as an anneal's end, so that a proof can list the events after its last step."""

import math
from collections.abc import Iterable
from typing import Any

from holdfast.schedule import Schedule
from holdfast.training.build import Training
from holdfast.training.schedulers import name_schedules

# The attributes of torch's schedulers with the steps at which a schedule ends or changes.
MILESTONES = ("milestones", "_milestones", "step_size", "T_max", "T_0", "total_iters", "total_steps", "step_size_up")


def list_events(training: Training) -> dict[str, float]:
    """Return the step of each event, by name: ends of schedules and anneals, milestones, the data's second pass."""
    epoch, recipe = training.steps_per_epoch, training.recipe
    events: dict[str, float] = {}
    if training.order is not None:
        events["the data's second pass"] = training.order.steps_per_pass + 1
    for name, anneal in recipe.anneals.items():
        events[f"the end of anneal {name!r}"] = anneal.bounds(epoch)[1]
    for name, schedule in name_schedules(recipe).items():
        if isinstance(schedule, Schedule) and schedule.name != "constant":
            length = schedule.step_size if schedule.name == "step" else schedule.epochs
            end = f"the {schedule.name} schedule's {'first step' if schedule.name == 'step' else 'end'}"
            events[f"{end} for {name!r}" if name else end] = length * epoch
    for scheduler in training.schedulers:
        events |= _milestones(scheduler)
    return events


def find_idle(training: Training) -> list[str]:
    """Return a warning for each `Schedule` that ends before the run, with a learning rate of 0 from then on."""
    epoch, epochs = training.steps_per_epoch, training.config.epochs
    found = []
    for name, schedule in name_schedules(training.recipe).items():
        if isinstance(schedule, Schedule) and schedule.name in ("linear", "cosine"):
            start = math.ceil(schedule.epochs * epoch)
            if start < epochs * epoch and not schedule.factor(start, epoch):
                whose = f" of {name!r}" if name else ""
                ends = f"the {schedule.name} schedule ends after {schedule.epochs:g} of the run's {epochs} epochs"
                found.append(f"the learning rate{whose} is 0 from step {start} on: {ends}")
    return found


def _milestones(scheduler: Any) -> dict[str, float]:
    events = {}
    for name in MILESTONES:
        found = getattr(scheduler, name, None)
        steps = [float(each) for each in (found if isinstance(found, Iterable) else [found]) if each]
        if steps:
            events[f"{type(scheduler).__name__}.{name.lstrip('_')}"] = max(steps)
    for inner in getattr(scheduler, "_schedulers", ()):
        events |= _milestones(inner)
    return events
