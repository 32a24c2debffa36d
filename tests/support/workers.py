"""A dataset whose samples tell of the process that has read them, and a process that ends with its loader workers."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from holdfast.data import Share, make_batches

SAMPLES, SIZE, SEED = 12, 3, 7


class Telling(Dataset[Tensor]):
    """Samples of a number, a random number, the process's id, what `tell` has told it, and the epoch."""

    told = 0.0
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, as a curriculum does."""
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        told = [os.getpid(), self.told, self.epoch]
        return torch.tensor([index, torch.rand(()).item(), *told], dtype=torch.float64)


class OneRank:
    """A rank that trains alone, for batches."""

    own_number = 0

    def gather(self, value: Any) -> list[Any]:
        """Return the rank's own value."""
        return [value]

    def gather_samples(self, name: str) -> list[str]:
        """Return the rank's own name."""
        return [name]


def tell(worker: int) -> None:
    """Tell the dataset of a worker's beginning."""
    info: Any = get_worker_info()
    info.dataset.told = 1.0 + worker


def begin(loader: Any, workers: int) -> Any:
    """Return the batches of a loader, which so many workers load."""
    batches = make_batches(loader, [Share(SIZE)], SEED, workers, OneRank())
    batches.begin(0, 99)
    return batches


def load(loader: Any, workers: int, count: int) -> list[Tensor]:
    """Return the first batches of a loader, loaded by so many workers."""
    batches = begin(loader, workers)
    return [next(batches)[1] for _ in range(count)]


if __name__ == "__main__":
    batches = begin(DataLoader(Telling(), SIZE), 2)
    next(batches)
    print("leaves")
