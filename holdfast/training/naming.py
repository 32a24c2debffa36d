"""The conversion of an optimizer's state between parameter numbers and parameter names.

torch numbers an optimizer's parameters in the order in which the optimizer got them. On a resume the recipe may build
the parameters in a different order. If a moment were saved by number, it could then silently be restored to a different
parameter of equal shape.
"""

from typing import Any

import torch

from holdfast.training.build import Training
from holdfast.training.grouping import FROZEN, REGROUPED
from holdfast.training.optimizers import parts_of


def optimizer_state(training: Training) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` with names in place of numbers.

    Each group lists the names of its parameters, sorted. Two kinds of groups keep their order instead: groups that a
    step has changed, and the group of L-BFGS, whose single state depends on the parameters' order.
    """
    state: dict[str, Any] = training.optimizer.state_dict()
    if not _has_numbers(state):
        return state
    names, grouping = name_parameters(training), training.as_built.grouping
    keeps_order = any(isinstance(each, torch.optim.LBFGS) for each in parts_of(training.recipe.optimizer))
    groups = [[names[number] for number in group["params"]] for group in state["param_groups"]]
    return (
        state
        | {
            "state": {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
            "param_groups": [
                group
                | {"params": members if keeps_order or not grouping.is_built(number, members) else sorted(members)}
                for number, (group, members) in enumerate(zip(state["param_groups"], groups, strict=True))
            ],
        }
        | grouping.describe(groups)
    )


def numbered_state(training: Training, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state from `optimizer_state` with the present optimizer's parameter numbers in place of the names.

    A state of an earlier version has numbers already and is returned unchanged.

    Raises:
        ValueError: a parameter is missing from the checkpoint or from the optimizer, or the number of groups differs.
    """
    if not has_names(saved):
        return saved
    own: dict[str, Any] = training.optimizer.state_dict()
    names = name_parameters(training)
    members = {name for group in saved["param_groups"] for name in group["params"]}
    for name in sorted(members ^ set(names)):
        lacks = "the checkpoint" if name in names else "the recipe's optimizer"
        raise ValueError(f"{lacks} has no parameter {name}")
    if len(own["param_groups"]) != len(saved["param_groups"]):
        raise ValueError(f"{len(saved['param_groups'])} groups were saved, and there are {len(own['param_groups'])}")
    numbers = {name: number for number, name in enumerate(names)}
    plain = {key: value for key, value in saved.items() if key not in (REGROUPED, FROZEN)}
    return plain | {
        "state": {numbers.get(key, key): value for key, value in saved["state"].items()},
        # A parameter that is now in another group isn't noticed here, but by the gate, which each resume passes.
        "param_groups": [
            group | {"params": built["params"]}
            for group, built in zip(saved["param_groups"], own["param_groups"], strict=True)
        ],
    }


def has_names(saved: dict[str, Any]) -> bool:
    """Return whether a saved optimizer state has names; earlier versions saved numbers."""
    return "state" in saved and any(isinstance(each, str) for each in _list_members(saved))


def _has_numbers(state: dict[str, Any]) -> bool:
    return "state" in state and any(isinstance(each, int) for each in _list_members(state))


def _list_members(state: dict[str, Any]) -> list[Any]:
    return [each for group in state.get("param_groups", ()) for each in group.get("params", ())]


def name_parameters(training: Training) -> list[str]:
    """Return the name of each parameter of the optimizer, in the optimizer's order; see `Grouping.name_known`."""
    known = training.as_built.grouping.name_known()
    return [
        known.get(id(parameter), f"{number}.{place}")
        for number, group in enumerate(training.optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
