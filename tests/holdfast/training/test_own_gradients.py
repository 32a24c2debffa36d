"""The checksum of one rank's own gradient, over the backward passes of a step."""

import torch
from torch import nn

from holdfast.training.own_gradients import OwnGradients


def describe(*passes: float, between: float = 1.0) -> str:
    """Return the description of a step with some backward passes. Multiply the gradients between these by a factor."""
    torch.manual_seed(0)
    model, gradients = nn.Linear(3, 2), OwnGradients()
    with gradients.watching(model):
        for number, scale in enumerate(passes):
            for each in model.parameters() if number else ():
                each.grad.mul_(between)  # type: ignore[union-attr]
            (model(torch.ones(4, 3)).sum() * scale).backward()
    return gradients.describe()


def test_the_gradients_of_all_backward_passes_count() -> None:
    assert describe(1.0, 2.0) == describe(3.0) != describe(1.0)
    assert describe() == ""


def test_a_gradient_that_is_averaged_before_the_last_pass_is_no_rank_s_own() -> None:
    assert describe(1.0, 2.0, between=0.5) == ""
