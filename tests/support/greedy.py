"""A recipe that runs out of memory in its fourth step."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from holdfast import Recipe

FROM_STEP = 3


def greedy() -> Recipe:
    """Build the recipe."""
    model = nn.Linear(1, 1)
    steps = 0

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal steps
        steps += 1
        if steps > FROM_STEP:
            torch.empty(2**50)
        return model(batch[0]).square().mean()

    data = TensorDataset(torch.ones(40, 1))
    return Recipe(
        model=model, data=data, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, batch_size=4
    )
