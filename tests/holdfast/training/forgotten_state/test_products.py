"""A copy of the weights that steps change and that no checkpoint contains is warned of."""

import torch
from torch import nn

from holdfast.training.examinations import find_outside_copies
from tests.support.careless import fit, make, net


def test_an_average_that_only_an_evaluation_reads_is_warned_of_and_a_teacher_is_not() -> None:
    mean, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    model = net()
    recipe = make(
        model,
        lambda model, batch: fit(model, batch) + teacher(torch.ones(1)).detach().sum(),
        evaluate=lambda model: {"mean": mean.weight.sum()},
    )
    outside = find_outside_copies(recipe)
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[operator]
    assert outside.find_changed(recipe) == {}
    mean.weight.data.add_(1)
    (line,) = outside.find_changed(recipe).values()
    assert line.startswith(f"{__file__}:")
    assert "steps change mean (Linear), and no checkpoint contains it" in line
    assert line.endswith('extras={"mean": mean}')


class Average:
    """An average of the weights as people write it: a dict of tensors, and the weights before, to be swapped in."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.sizes = [torch.tensor(each.numel()) for each in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        for name, each in self.model.named_parameters():
            self.shadow[name] = self.shadow[name].lerp(each, 0.5)
        self.sizes = [each + 1 for each in self.sizes]


def test_a_dict_with_an_average_of_the_weights_is_warned_of() -> None:
    model = net()
    average = Average(model)
    recipe = make(model, fit, after_step=average.update)
    outside = find_outside_copies(recipe)
    assert outside.find_changed(recipe) == outside.find_changed(recipe) == {}
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[operator]
    average.update()
    assert outside.find_changed(recipe) == {}, "all copies are read at the saves 1, 2, 4, 8 ..."
    (line,) = outside.find_changed(recipe).values()
    assert [outside.find_changed(recipe) for _ in range(5, 9)] == [{}] * 4, "one warning is enough"
    assert line.startswith(f"{__file__}:")
    assert "steps change self.shadow (dict), and no checkpoint contains it" in line


def test_a_module_that_cannot_be_read_is_left_out() -> None:
    lazy, meta = nn.LazyLinear(1), nn.Linear(1, 1, device="meta")
    recipe = make(net(), fit, evaluate=lambda model: {"n": len([lazy, meta])})
    assert find_outside_copies(recipe).find_changed(recipe) == {}
