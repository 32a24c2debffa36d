"""Optimizers that aren't whole: one whose state is divided over the ranks, and one without torch's attributes."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import RecipeError
from holdfast.training.optimizers import complete_hooks, refuse_partitioned


class Wrapper(torch.optim.Optimizer):
    """Doesn't call torch's constructor, as opacus's ``DPOptimizer`` doesn't."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self._optimizer_step_pre_hooks: dict[int, Any] = OrderedDict()  # as timm's Lookahead has

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


class Divided(torch.optim.SGD):
    """Has the method by which torch's ``ZeroRedundancyOptimizer`` collects its state in one rank."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        raise NotImplementedError


def test_an_optimizer_that_divides_its_state_over_the_ranks_is_refused() -> None:
    parameters = [*nn.Linear(1, 1).parameters()]
    refuse_partitioned("optimizer", torch.optim.SGD(parameters))
    with pytest.raises(RecipeError, match=r"run\.keep\(optimizer=\.\.\.\) is a Divided, which divides its state"):
        refuse_partitioned("run.keep(optimizer=...)", Divided(parameters))


def test_an_optimizer_that_lacks_torchs_attributes_is_given_them_once() -> None:
    optimizer = Wrapper(torch.optim.SGD([*nn.Linear(1, 1).parameters()]))
    complete_hooks(optimizer)
    seen: list[object] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    complete_hooks(optimizer)
    optimizer.step()
    optimizer.register_load_state_dict_pre_hook(print)
    assert seen == [1]
