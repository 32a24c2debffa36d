"""A recipe that notes the samples of each step and draws no random number, for runs on changing numbers of ranks."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from holdfast import Recipe

SAMPLES = 192
BATCH_SIZE = 12
GRAD_ACCUM = 2
STEPS_PER_EPOCH = SAMPLES // (BATCH_SIZE * GRAD_ACCUM)
LIFE = "NUMBERED_LIFE"


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Points of a function, each with its number."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(7))
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


class Own:
    """A number of this rank's own."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rank = state["rank"]


def numbered(notes: str = "", own: bool = False) -> Recipe:
    """Build a small network.

    Args:
        notes: the file to which each rank adds a line for each step: the life (the variable `LIFE`), the rank, the
            step, and the numbers of its samples.
        own: whether each rank has an extra of its own.
    """
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    taken: list[list[int]] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        numbers, x, y = batch
        taken.append(numbers.tolist())
        return F.mse_loss(model(x), y)

    def after_step() -> None:
        line: dict[str, Any] = {name: int(os.environ.get(name, 0)) for name in (LIFE, "RANK")}
        line["step"] = int(optimizer.state[model[0].weight]["step"])
        line["samples"] = [number for batch in taken[-GRAD_ACCUM:] for number in batch]  # the probe's come before
        taken.clear()
        if notes:
            with Path(notes).open("a") as file:
                file.write(json.dumps(line) + "\n")

    return Recipe(
        model=model,
        data=Numbered(),
        optimizer=optimizer,
        loss=loss,
        batch_size=BATCH_SIZE,
        grad_accum=GRAD_ACCUM,
        clip_norm=1.0,
        after_step=after_step,
        extras={"own": Own()} if own else {},
    )
