"""Advice for the user's code: the line with which a checkpoint would contain a value."""

import re
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from holdfast import state
from holdfast.checkpoint.found import ENDED, ITERATOR
from holdfast.training.forgotten_state.digests import CONTAINERS, is_iterator
from holdfast.training.forgotten_state.registered import has_state
from holdfast.training.kept import FRAMEWORK


@dataclass
class At:
    """A value that the search has reached, and its place in the program.

    Attributes:
        root: the recipe's field from which the search reached the value, or `LOOP`.
        owner: the object that has the value; None for a variable.
        depth: how many nested objects of libraries contain the value, up to the first object of the user's.
        place: the file and line for the report, as in `Found.place`; empty if the search still has to find them.
        is_noted: whether the value is reported if it is a plain value.
    """

    root: str
    name: str
    value: Any
    owner: Any = None
    depth: int = 0
    place: str = ""
    is_noted: bool = True


def find_remedy(at: At, *, is_loop: bool) -> str:
    """Return the line to add to the user's code, so that checkpoints contain a value.

    Args:
        is_loop: whether the value belongs to a loop; False if it belongs to a recipe.
    """
    key, owner = last_part(at.name), at.owner
    if not is_loop:
        if at.root == "model" and isinstance(at.value, nn.Module):
            return "use nn.ModuleList or nn.ModuleDict in place of a plain list or dict"
        is_object = has_state(at.value) and not state.is_generator(at.value)
        what = at.name if is_object else f"..., an object whose state_dict has {at.name}"
        return f'extras={{"{key}": {what}}}'
    if at.root in (ITERATOR, ENDED):
        return "the iterator begins anew after a resume: count with the step.number of `for step in run.steps()`"
    if at.root == FRAMEWORK:
        return f"run.keep({key}={at.name}) if it is a container, or register_buffer, or on_save_checkpoint"
    if isinstance(owner, nn.Module) and not isinstance(at.value, CONTAINERS):
        return f'register_buffer("{key}", ...) in its module'
    if has_state(at.value) or isinstance(at.value, (*CONTAINERS, Tensor, np.ndarray)):
        is_attribute = owner is not None and state.is_generator(at.value)
        return f"run.keep({key}={at.name})" + ("; create the generator first if it is None" if is_attribute else "")
    if isinstance(at.value, types.GeneratorType) or is_iterator(at.value):
        return "keep the loader or the data that the iterator reads"
    attributes = getattr(owner, "__dict__", {})
    if attributes and at.name.count(".") == 1 and all(map(state.is_plain, attributes.values())):
        return f"run.keep({last_part(at.name.rpartition('.')[0])}=vars({at.name.rpartition('.')[0]}))"
    return f'put it in a dict, state = {{"{key}": ...}}, and call run.keep(state=state)'


def last_part(name: str) -> str:
    """Return the last identifier in a name: ``heads`` for ``model.heads[0]``."""
    found = re.findall(r"[^\W\d]\w*", re.sub(r"\[.*?\]| #\d+", "", name))
    return str(found[-1]) if found else "value"
