"""A recipe that fails or hangs in one of several ranks."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast import Recipe
from tests.support.toy import Made


def failing(how: str = "", rank: int = 1) -> Recipe:
    """Build a recipe that fails in the third step of one rank.

    Args:
        how: an error in torch (``raise``), SIGKILL (``kill``), a read of memory that isn't there (``crash``), or more
            memory than there is (``greed``).
    """
    model = nn.Linear(8, 1)
    step = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal step
        step += model.training
        x, y = batch
        if how and model.training and step == 3 and os.environ.get("RANK", "0") == str(rank):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "crash":
                ctypes.string_at(0)
            if how == "greed":
                torch.empty(2**50, device=x.device)
            x = x[:, :3]
        time.sleep(0.02)
        return F.mse_loss(model(x), y)

    return Recipe(
        model=model, data=Made(), optimizer=torch.optim.SGD(model.parameters(), 0.01), loss=loss, batch_size=4
    )


def hanging(how: str, rank: int, struck: str) -> Recipe:
    """Build a recipe that hangs in the fifth step of one rank, once: while the file ``struck`` doesn't exist.

    Args:
        how: ``stop`` (SIGSTOP), ``lock`` (a lock that nobody opens, in the loss) or ``data`` (a sample that never
            comes).
    """
    model = nn.Linear(8, 1)
    steps = 0

    def hang(kind: str) -> None:
        if how != kind or os.environ.get("RANK", "0") != str(rank) or Path(struck).exists():
            return
        Path(struck).touch()
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    class Data(Made):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if steps == 4:
                hang("data")
            return super().__getitem__(index)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal steps
        steps += model.training
        if steps == 5:
            hang("stop")
            hang("lock")
        time.sleep(0.02)
        return F.mse_loss(model(batch[0]), batch[1])

    return Recipe(
        model=model, data=Data(), optimizer=torch.optim.SGD(model.parameters(), 0.01), loss=loss, batch_size=4
    )
