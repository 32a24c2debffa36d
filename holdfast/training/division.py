"""The division of a training's state over its ranks: into shards, or into the stages of a pipeline.

Most runs have none: each rank holds the whole state. So the code is imported at the first division.
"""

import pkgutil
from typing import TYPE_CHECKING

from torch import nn

from holdfast.checkpoint import Payload
from holdfast.recipe import Recipe
from holdfast.state import has_shards, is_sharded
from holdfast.state.tensor_forms import list_shards
from holdfast.training.build import Training

if TYPE_CHECKING:
    from holdfast.training.divided import Division

DIVISION = "holdfast.training.divided:Division"


def make_division(training: Training) -> "Division":
    """Return the division of a training's state."""
    division: Division = pkgutil.resolve_name(DIVISION)(training)
    return division


def find_division(training: Training, payload: Payload) -> "Division | None":
    """Return how a state is divided over the ranks; None if each rank holds all of it.

    Args:
        payload: the state, or the components of it that all ranks have in common.
    """
    is_divided = training.ranks.stages is not None or has_shards(payload)
    return make_division(training) if is_divided else None


def find_built_division(training: Training) -> "Division | None":
    """Return how the state will be divided that a restore loads into the model and the extras; None if it won't be."""
    is_divided = training.ranks.stages is not None or _builds_shards(training.recipe)
    return make_division(training) if is_divided else None


def _builds_shards(recipe: Recipe) -> bool:
    built = [recipe.model, *recipe.extras.values()]
    parameters = [parameter for each in built if isinstance(each, nn.Module) for parameter in each.parameters()]
    # A hook may give `state_dict` whole tensors in place of sharded parameters.
    return any(map(is_sharded, parameters)) or any(True for each in built for _ in list_shards(each.state_dict()))
