"""The cards recipe with a policy that collapses after a given step: from then on it always passes.

COLLAPSE_AT in the environment is that step; with WITHOUT_LIMITS the policy's health has no limits.
"""

import os
from typing import Any

import torch

from examples.cards import cards
from examples.cards.settings import HealthSettings, Settings
from holdfast import Run

LOGITS = (14.0, 0.0)  # of Pass and Bet


def collapsing(run: Run, settings: Settings) -> None:
    """Train the recipe. With one pass and one minibatch, Adam counts the run's steps."""
    if "WITHOUT_LIMITS" in os.environ:
        HealthSettings.limits = lambda self: {}  # type: ignore[method-assign]
    torch.optim.Adam.step = collapse(torch.optim.Adam.step)  # type: ignore[method-assign, assignment]
    cards(run, settings)


def collapse(step: Any) -> Any:
    """Return an optimizer's step after which the logits' layer gives `LOGITS`, from the run's step on."""

    def step_and_collapse(optimizer: torch.optim.Adam, closure: Any = None) -> None:
        step(optimizer)
        parameters = optimizer.param_groups[0]["params"]
        (bias,) = (each for each in parameters if each.shape == (2,))
        (weight,) = (each for each in parameters if each.dim() == 2 and len(each) == 2)
        if optimizer.state[bias]["step"] >= int(os.environ["COLLAPSE_AT"]):
            with torch.no_grad():
                weight.zero_()
                bias.copy_(torch.tensor(LOGITS))

    return step_and_collapse
