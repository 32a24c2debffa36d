"""The changes of modules since they were built, as a state."""

import torch
from torch import nn

from holdfast.training.modes import Modes


def test_an_attribute_is_again_the_tensor_that_it_was_built_with() -> None:
    model = nn.Linear(2, 2)
    model.cache = table = torch.arange(3.0)
    modes = Modes(model, [torch.optim.SGD(model.parameters())])
    built = modes.state_dict()
    model.cache = None  # type: ignore[assignment]
    modes.load_state_dict(built)
    assert model.cache is table
    model.extra = 3  # type: ignore[assignment]
    modes.load_state_dict(built)
    assert not hasattr(model, "extra")
