"""A recipe that fails in one of several ranks."""

import os
import signal
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast import Recipe
from tests.support.toy import Made


def failing(how: str = "", rank: int = 1) -> Recipe:
    """Build a recipe that fails in the third step of one rank: an error in torch (``raise``) or SIGKILL (``kill``)."""
    model = nn.Linear(8, 1)
    step = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal step
        step += model.training
        x, y = batch
        if how and model.training and step == 3 and os.environ.get("RANK", "0") == str(rank):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            x = x[:, :3]
        time.sleep(0.02)
        return F.mse_loss(model(x), y)

    return Recipe(
        model=model, data=Made(), optimizer=torch.optim.SGD(model.parameters(), 0.01), loss=loss, batch_size=4
    )
