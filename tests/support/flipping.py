"""The toy recipe on a machine that computes wrongly: on one host a bit of a gradient flips, once or from a step on."""

import os
from pathlib import Path

import torch

from holdfast import Recipe
from holdfast.machine.host import VARIABLE
from tests.support.toy import toy

BIT = 1 << 20  # of a float32's fraction: a difference that no kernel rounds away


def flipping() -> Recipe:
    """Build the toy. A bit of its first weight's gradient flips on the host FLIP_HOST, from the step FLIP_FROM on.

    The step is counted by the optimizer. If FLIP_ONCE names a file, the bit flips once and makes the file.
    """
    recipe = toy()
    weight, optimizer = recipe.model[0].weight, recipe.optimizer  # type: ignore[index,union-attr]

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        step = int(optimizer.state[weight].get("step", 0)) + 1  # type: ignore[union-attr]
        once = os.environ.get("FLIP_ONCE")
        is_due = step >= int(os.environ["FLIP_FROM"]) and not (once and Path(once).exists())
        if os.environ.get(VARIABLE) != os.environ["FLIP_HOST"] or not is_due:
            return gradient
        if once:
            Path(once).touch()
        flipped = gradient.clone()
        flipped.view(torch.int32).view(-1)[0] ^= BIT
        return flipped

    if "FLIP_HOST" in os.environ:
        weight.register_hook(flip)
    return recipe


def faulty(host: str, step: int, once: Path | None = None) -> dict[str, str]:
    """Return the variables with which a bit flips on a host, from a step on or once."""
    return {"FLIP_HOST": host, "FLIP_FROM": str(step)} | ({"FLIP_ONCE": str(once)} if once else {})
