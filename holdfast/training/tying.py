"""Replace copies of the model's tensors in an optimizer's restored state by the tensors themselves."""

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint import Payload
from holdfast.training.build import Training
from holdfast.training.naming import name_parameters
from holdfast.training.optimizers import list_members


def tie_to_model(training: Training, payload: Payload) -> None:
    """Replace copies of the model's tensors in an optimizer's restored state by the tensors themselves.

    The saved state tells where: for example, the state of the optimizer SAM referred to the model's tensors.

    Args:
        payload: the payload that was restored.
    """
    weights = {f"model.{name}": each for name, each in training.recipe.model.state_dict().items()}
    members = list_members(training.recipe.optimizer)
    states = payload.tree["optimizer"].get("state", {})
    for name, (part, parameter) in zip(name_parameters(training), members, strict=True):
        found, own = states.get(name), part.state.get(parameter, {})
        for key in found.keys() & own.keys() if isinstance(found, dict) and isinstance(own, dict) else ():
            own[key] = _tie(own[key], found[key], weights)


def _tie(value: Any, encoded: Any, weights: Mapping[str, Any]) -> Any:
    """Return a value with the model's tensors in place of their copies.

    Args:
        encoded: the value in a payload's tree.
    """
    mark, inner = next(iter(encoded.items())) if isinstance(encoded, dict) and len(encoded) == 1 else ("", encoded)
    if mark == "$as":
        return _tie(value, inner[0], weights)
    if mark == "$tensor":
        return weights.get(inner, value)
    if mark == "$tuple" and type(value) is tuple:
        return tuple(_tie(each, own, weights) for each, own in zip(value, inner, strict=True))
    if isinstance(value, list) and isinstance(encoded, list):
        value[:] = (_tie(each, own, weights) for each, own in zip(value, encoded, strict=True))
    elif type(value) is dict and isinstance(encoded, dict):
        items = zip(value, (own for _, own in inner), strict=True) if mark == "$dict" else encoded.items()
        for key, own in items:
            value[key] = _tie(value[key], own, weights)
    return value
