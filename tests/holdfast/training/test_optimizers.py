"""An optimizer whose state is divided over the ranks is refused."""

import pytest
import torch
from torch import nn

from holdfast.errors import RecipeError
from holdfast.training.optimizers import refuse_partitioned


class Divided(torch.optim.SGD):
    """Has the method by which torch's ``ZeroRedundancyOptimizer`` collects its state in one rank."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        raise NotImplementedError


def test_an_optimizer_that_divides_its_state_over_the_ranks_is_refused() -> None:
    parameters = [*nn.Linear(1, 1).parameters()]
    refuse_partitioned("optimizer", torch.optim.SGD(parameters))
    with pytest.raises(RecipeError, match=r"run\.keep\(optimizer=\.\.\.\) is a Divided, which divides its state"):
        refuse_partitioned("run.keep(optimizer=...)", Divided(parameters))
