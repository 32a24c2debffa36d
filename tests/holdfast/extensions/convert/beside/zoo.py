"""What two of the scripts import: a module beside a script stays as it is."""

import random

import torch
from torch.utils.data import Dataset, TensorDataset


def make_dataset(size: int) -> Dataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(6))
    return TensorDataset(x, (x.sum(1) > 0).long())


class RingBuffer:
    def __init__(self, size: int) -> None:
        self.size, self.rows = size, []

    def add(self, row: tuple) -> None:
        self.rows = [*self.rows, row][-self.size :]

    def sample(self, count: int) -> list[torch.Tensor]:
        places, actions, rewards = zip(*random.choices(self.rows, k=count), strict=True)
        return [torch.tensor(places)[:, None], torch.tensor(actions)[:, None], torch.tensor(rewards)]
