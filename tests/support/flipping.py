"""Recipes on a machine that computes wrongly: on one host a bit of a gradient flips, once or in some steps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast import Recipe
from holdfast.machine.host import VARIABLE
from tests.support import shares
from tests.support.toy import toy

BIT = 1 << 20  # of a float32's fraction: a difference that no kernel rounds away


def flipping() -> Recipe:
    """Build the toy. A bit of its first weight's gradient flips, also in a probe's; see `make_flip`."""
    recipe = toy()
    weight = recipe.model[0].weight  # type: ignore[index]
    if "FLIP_HOST" in os.environ:
        weight.register_hook(make_flip(recipe, weight))  # type: ignore[operator,union-attr,arg-type]
    return recipe


def flipping_in_shares() -> Recipe:
    """Build a recipe for several ranks, with virtual ranks or without.

    A bit of its last weight's gradient flips in steps alone: a probe takes gradients without the hook here.
    """
    recipe = shares.averaged("alike")
    weight: Any = recipe.model.head.weight  # type: ignore[union-attr]
    if "FLIP_HOST" in os.environ:
        flip = make_flip(recipe, weight)

        def replace(parameter: Any) -> None:
            parameter.grad.copy_(flip(parameter.grad))

        weight.register_post_accumulate_grad_hook(replace)
    return recipe


def make_flip(recipe: Recipe, weight: torch.nn.Parameter) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that flips a bit of the weight's gradient on the host FLIP_HOST.

    FLIP_STEPS says when: one number is the step from which on it flips, several are the only steps. The steps are
    counted by the optimizer. If FLIP_ONCE names a file, the bit flips once and makes the file. If FLIP_RANK is set, it
    flips in that rank alone.
    """
    optimizer, rank = recipe.optimizer, os.environ.get("RANK", "0")

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        step = int(optimizer.state[weight].get("step", 0)) + 1  # type: ignore[union-attr]
        once = os.environ.get("FLIP_ONCE")
        steps = [int(each) for each in os.environ["FLIP_STEPS"].split()]
        is_due = (step in steps if len(steps) > 1 else step >= steps[0]) and not (once and Path(once).exists())
        is_due &= os.environ.get("FLIP_RANK", rank) == rank
        if os.environ.get(VARIABLE) != os.environ["FLIP_HOST"] or not is_due:
            return gradient
        if once:
            Path(once).touch()
        flipped = gradient.clone()
        flipped.view(torch.int32).view(-1)[0] ^= BIT
        return flipped

    return flip


def faulty(host: str, *steps: int, once: Path | None = None, rank: int | None = None) -> dict[str, str]:
    """Return the variables with which a bit flips on a host, in all ranks or in one.

    Args:
        steps: one step, from which on the bit flips; or several steps, the only ones in which it flips.
        once: a file that the first flip makes; afterwards no bit flips.
    """
    found = {"FLIP_HOST": host, "FLIP_STEPS": " ".join(map(str, steps))} | ({"FLIP_ONCE": str(once)} if once else {})
    return found if rank is None else found | {"FLIP_RANK": str(rank)}
