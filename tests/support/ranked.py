"""A loop whose ranks each take their own samples and draw their own noise."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from holdfast import Run
from tests.support.meshed import BATCH, make_data


def train(run: Run, shuffles: bool) -> None:
    """Train a layer.

    Args:
        shuffles: whether a shuffled loader is divided by Holdfast; otherwise the loop divides the data by data rank.
    """
    torch.manual_seed(3)
    model = run.wrap(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = run.generator("noise")
    run.keep(model=model, optimizer=optimizer)
    data = make_data()
    loader = DataLoader(data, BATCH, shuffle=True)
    if not shuffles:
        loader = DataLoader(data, BATCH // 2, sampler=DistributedSampler(data, run.data_ranks, run.data_rank))
    for step in run.steps(loader):
        points, classes = step.batch
        loss = F.cross_entropy(model(points + torch.randn(points.shape, generator=noise)), classes)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step.log(loss=loss)
