"""Steps that don't look at all gradients: a save contains those on which the next step may depend."""

import pytest
import torch
from torch import nn

from holdfast.training.left_gradients import Gradients


class Loop:
    """Two layers and an optimizer. Its first three steps look at all gradients; those after them don't."""

    def __init__(self) -> None:
        self.model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.gradients = Gradients(self.model, self.optimizer)
        for _ in range(3):
            self.step()
        self.gradients.looks_at_all = False

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.pass_backward(0, 1)
        self.optimizer.step()
        self.gradients.end_step()

    def pass_backward(self, *layers: int) -> None:
        sum(self.model[each](torch.ones(2)).sum() for each in layers).backward()  # type: ignore[union-attr]

    def count_saved(self) -> int:
        return len(self.gradients.state_dict().keys() - {""})


def test_a_loop_that_clears_its_gradients_saves_none() -> None:
    loop = Loop()
    loop.step()
    assert loop.count_saved() == 0
    with torch.inference_mode(), torch.no_grad():
        assert loop.count_saved() == 0


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
def test_gradients_of_a_pass_after_the_step_are_saved(layers: tuple[int, ...]) -> None:
    loop = Loop()
    loop.step()
    loop.pass_backward(*layers)
    expected = {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}
    assert expected <= loop.gradients.state_dict().keys()


def test_a_pass_without_a_step_of_the_optimizer_is_saved() -> None:
    loop = Loop()
    loop.optimizer.zero_grad()
    loop.pass_backward(1)
    loop.gradients.end_step()
    assert loop.count_saved() == 2


def test_a_loop_with_passes_after_the_step_has_each_gradient_looked_at() -> None:
    loop = Loop()
    loop.gradients.looks_at_all = True
    loop.optimizer.zero_grad()
    loop.pass_backward(0, 1)
    loop.optimizer.step()
    loop.pass_backward(1)  # noted, because this step looks at all gradients
    loop.gradients.end_step()
    loop.gradients.looks_at_all = False
    loop.optimizer.zero_grad()
    loop.pass_backward(0, 1)
    loop.optimizer.step()
    loop.pass_backward(1)
    loop.gradients.end_step()
    assert sorted(loop.gradients.state_dict().keys() - {""}) == ["1.bias", "1.weight"]
