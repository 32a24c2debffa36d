"""The forms of objects with a ``state_dict``: properties that a resume can't restore from the state, such as the class.

A step may replace an object of a kept container by a new one. A resume then loads the new object's state into the
object that the recipe builds. That restores the new object only if both have the same form.
"""

import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.provenance.hyperparameters import is_hyperparameter, is_public
from holdfast.state.generators import is_generator


@dataclass(frozen=True)
class Form:
    """The form of an object when the loop began.

    Attributes:
        kind: the object's class.
        parts: by name, the properties that have to be equal in the new object: a module's layers, the shapes of its
            tensors and its tuples and functions; the class of a generator's bit generator, and the generator's device.
        switches: the properties of a module that a resume can set again: see `read_switches`.
    """

    kind: type
    parts: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)


def describe_form(value: Any) -> Form:
    """Return the form of an object with a ``state_dict``, or of a generator of random numbers."""
    if isinstance(value, nn.Module):
        return Form(type(value), dict(_list_module_parts(value)), read_switches(value))
    if is_generator(value):
        own = type(value.bit_generator) if isinstance(value, np.random.Generator) else None
        device = value.device.type if isinstance(value, torch.Generator) else None
        return Form(type(value), {"bit generator": own, "device": device})
    return Form(type(value))


def find_other_part(one: Form, other: Form) -> str:
    """Return the name of the first part that differs between two forms of one class; empty if all are equal."""
    names = sorted(one.parts.keys() | other.parts.keys())
    return next((name for name in names if one.parts.get(name) != other.parts.get(name)), "")


def _list_module_parts(module: nn.Module) -> Any:
    for prefix, each in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        yield f"layer {prefix}", type(each)
        for key, value in vars(each).items():
            if is_public(key) and isinstance(value, tuple | types.FunctionType | types.BuiltinFunctionType):
                yield f"{dot}{key}", value
        for key, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is not None and key not in each._non_persistent_buffers_set:
                yield f"{dot}{key}", (tuple(tensor.shape), tensor.dtype)


def read_switches(module: nn.Module) -> dict[str, Any]:
    """Return the properties of a module that its ``state_dict`` lacks and `set_switches` can set.

    These are the layers in evaluation mode, the frozen parameters, and the layers' public numbers, switches and texts.
    """
    return {
        "eval": sorted(name for name, each in module.named_modules() if not each.training),
        "frozen": sorted(name for name, each in module.named_parameters() if not each.requires_grad),
        "values": {
            name: {key: value for key, value in vars(each).items() if is_hyperparameter(key, value)}
            for name, each in module.named_modules()
        },
    }


def set_switches(module: nn.Module, switches: dict[str, Any]) -> None:
    """Set the properties that `read_switches` has returned."""
    for name, each in module.named_modules():
        each.training = name not in switches["eval"]
        for key, value in switches["values"].get(name, {}).items():
            setattr(each, key, value)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in switches["frozen"])
