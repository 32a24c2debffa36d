"""A loop of a user's own on several ranks: each step leaves out blocks, and does what it likes to its gradients."""

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Run

ACCUMULATED = 3


class Deep(nn.Module):
    """Blocks that are left out at random, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.unused = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, depths: torch.Generator | None) -> Tensor:
        for block in self.blocks:
            if torch.rand((), generator=depths) < 0.5:
                x = x + torch.tanh(block(x))
        return self.last(x)  # type: ignore[no-any-return]


def train(run: Run, gradients: str, blocks: str = "own", own: str = "") -> None:
    """Train.

    Args:
        gradients: what becomes of them: "none", "zero", "left", or "accumulated" over steps.
        blocks: whether each rank leaves out its "own" blocks, or all leave out the "same" ones.
        own: a DistributedDataParallel of the user's own in place of `Run.wrap`; "frozen": blocks that are frozen while
            the model is wrapped; "bare": no wrapper; "closure": an optimizer that reads each rank's own loss.
    """
    torch.manual_seed(3)
    if own == "default":
        model: nn.Module = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    elif own == "finding":
        model = DistributedDataParallel(Deep(), find_unused_parameters=True)
    else:
        deep = Deep()
        deep.blocks.requires_grad_(own != "frozen")
        model = deep if own == "bare" else run.wrap(deep)
        deep.blocks.requires_grad_(True)
    teacher = run.wrap(nn.Linear(8, 1).requires_grad_(False))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if own == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    depths = torch.Generator().manual_seed(5)
    run.keep(model=model, teacher=teacher, optimizer=optimizer, depths=depths)
    x = torch.rand(96, 8)
    loader = DataLoader(TensorDataset(x, teacher(x).detach()), batch_size=12, shuffle=True)
    for step in run.steps(loader):
        x, y = step.batch
        is_last = gradients != "accumulated" or step.number % ACCUMULATED == 0
        is_ddp = isinstance(model, DistributedDataParallel)
        with contextlib.nullcontext() if is_last or not is_ddp else model.no_sync():
            options = [] if own == "default" else [depths if blocks == "same" else None]
            loss = nn.functional.mse_loss(model(x, *options), y)
            loss.backward()  # type: ignore[no-untyped-call]
        if is_last:
            optimizer.step(*([loss.detach] if own == "closure" else []))
            if gradients == "left":
                for each in model.parameters():
                    if each.grad is not None:
                        each.grad.mul_(0.1)
            else:
                optimizer.zero_grad(set_to_none=gradients != "zero")
        step.log(loss=loss)


def write_config(folder: Path, ranks: int, gradients: str, parallel: str = "ddp", **settings: str) -> str:
    """Write a configuration of a run of `train`; return its path."""
    lines = [
        'recipe = "tests.support.wrapped:train"', 'run = "r"', "epochs = 2", "chunk.steps = 3",
        f"store = {json.dumps(str(folder))}", f"log.folder = {json.dumps(str(folder))}", 'compute.device = "cpu"',
        f"compute.ranks = {ranks}", f"compute.parallel = {json.dumps(parallel)}",
        *(f"settings.{name} = {json.dumps(each)}" for name, each in (settings | {"gradients": gradients}).items()),
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join(lines))
    return str(folder / "config.toml")
