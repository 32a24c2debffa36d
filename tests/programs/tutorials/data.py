"""Small data that the programs of this folder train on."""

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

STEPS = 10  # of an epoch
BATCH = 8
CLASSES = 4


def rows(count: int = STEPS * BATCH, width: int = 8) -> TensorDataset:
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sum(1, keepdim=True))


def labelled(count: int = STEPS * BATCH, width: int = 8) -> TensorDataset:
    x, y = rows(count, width).tensors
    return TensorDataset(x, (y[:, 0] > 0).long() + 2 * (x[:, 0] > 0).long())


def pictures(count: int = STEPS * BATCH, side: int = 8) -> TensorDataset:
    x = torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, torch.arange(count) % CLASSES)


def letters(count: int = 240) -> torch.Tensor:
    return (torch.arange(count) * 7 + torch.arange(count) // 5) % 12


class Windows(Dataset):
    """Windows of a text, each with the same window one letter later."""

    def __init__(self, length: int = 6, count: int = STEPS * BATCH) -> None:
        self.text, self.length, self.count = letters(), length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.text[index : index + self.length], self.text[index + 1 : index + self.length + 1]


def load(dataset: Dataset, **options: object) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": BATCH, "shuffle": True} | options)
