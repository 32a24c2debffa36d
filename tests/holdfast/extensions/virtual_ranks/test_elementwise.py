"""Optimizers whose step depends on how a tensor is cut by rows are found, and a trial leaves no trace."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.extensions.virtual_ranks.elementwise import check_elementwise
from holdfast.training.optimizers import Optimizers

CPU = torch.device("cpu")


class Noisy(torch.optim.SGD):
    """An optimizer that adds noise to each tensor."""

    def step(self, closure: Any = None) -> None:
        """Step each parameter by noise."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=-group["lr"])


class Last(torch.optim.SGD):
    """An optimizer that steps the last element of each tensor otherwise, as a kernel may do it behind its vectors."""

    def step(self, closure: Any = None) -> None:
        """Step each parameter along its gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                    state.add_(parameter.grad)
                    state.view(-1)[-1] *= 1 + 1e-7
                    parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
    ],
)  # fmt: skip
def test_elementwise_optimizers_pass_and_stay_as_they_are(make: Any) -> None:
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))]
    optimizer = make(parameters)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # which starts with a rate of 0
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(given))
    before = copy.deepcopy([parameters, optimizer.state_dict(), torch.get_rng_state()])
    check_elementwise(optimizer, CPU)
    after = [parameters, optimizer.state_dict(), torch.get_rng_state()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not seen


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, Noisy, Last])
def test_other_optimizers_are_refused(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.randn(3, 4))], lr=0.1)
    several = Optimizers({"a": torch.optim.SGD([nn.Parameter(torch.ones(1))]), "b": optimizer})
    before = torch.get_rng_state()
    for each in (optimizer, several):
        with pytest.raises(ConfigError, match=f"virtual ranks can't train with {kind.__name__} here") as found:
            check_elementwise(each, CPU)
        assert found.value.hint
    assert torch.equal(torch.get_rng_state(), before)
