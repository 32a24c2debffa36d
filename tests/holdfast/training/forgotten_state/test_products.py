"""A module that steps change and that no checkpoint contains is warned of at the first save."""

import gc

import torch
from torch import nn

from holdfast.training.examinations import compare_outside_modules, sum_outside_modules
from tests.support.careless import fit, make, net


def test_an_average_that_only_an_evaluation_reads_is_warned_of_and_a_teacher_is_not() -> None:
    mean, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    model = net()
    recipe = make(
        model,
        lambda model, batch: fit(model, batch) + teacher(torch.ones(1)).detach().sum(),
        evaluate=lambda model: {"mean": mean.weight.sum()},
    )
    gc.freeze()  # as a rank does before it trains
    before = sum_outside_modules(recipe)
    gc.unfreeze()
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[operator]
    assert compare_outside_modules(recipe, before) == []
    mean.weight.data.add_(1)
    (line,) = compare_outside_modules(recipe, before)
    assert line.startswith(f"{__file__}:")
    assert "steps change mean (Linear), and no checkpoint contains it" in line
    assert line.endswith('extras={"mean": mean}')


def test_a_module_that_cannot_be_read_is_left_out() -> None:
    lazy, meta = nn.LazyLinear(1), nn.Linear(1, 1, device="meta")
    recipe = make(net(), fit, evaluate=lambda model: {"n": len([lazy, meta])})
    assert compare_outside_modules(recipe, sum_outside_modules(recipe)) == []
