"""A recipe most of whose weights never change."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from holdfast import Recipe


def frozen() -> Recipe:
    """Build the recipe."""
    model = nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8), nn.Linear(8, 1))
    model[:2].requires_grad_(False)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(7))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    return Recipe(
        model=model,
        data=TensorDataset(x),
        optimizer=torch.optim.AdamW(model[2].parameters(), lr=0.01),
        loss=loss,
        batch_size=2,
    )
