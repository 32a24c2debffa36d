"""Values that a checkpoint may change on the way: shapes, strides, masks, views, files behind memory."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast import Recipe, Run
from tests.programs.network import PER_EPOCH, Batch, begin, draw, fit, grow, learn, make, net


def strides_of_moments(after: int) -> Recipe:
    """Train weights in channels_last with a fused optimizer, whose kernel reads memory in the order of addresses."""
    torch.manual_seed(1)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    model = convolutions.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        pictures = batch[0].repeat(1, 14)[:, :108].view(-1, 3, 6, 6).to(memory_format=torch.channels_last)
        return F.mse_loss(model(pictures), batch[1])

    return make(loss, model, optimizer=optimizer)


def array_without_dimensions(run: Run, after: int) -> None:
    """Keep statistics in arrays of the shape ()."""
    seen: dict[str, Any] = {"mean": np.zeros(()), "count": 0}
    model, optimizer = begin(run, seen=seen)
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        seen["count"] += 1
        seen["mean"] = seen["mean"] + (x.mean().item() - seen["mean"]) / seen["count"]
        scale = 1 + 0.1 * seen["mean"].ndim + float(seen["mean"]) * (step.number >= after)
        step.log(loss=learn(fit(model, (x, y)) * scale, optimizer))


def masked_array(run: Run, after: int) -> None:
    """Keep a masked NumPy array."""
    rewards = np.ma.masked_array(np.arange(4.0), mask=[0, 1, 0, 1])
    model, optimizer = begin(run, rewards={"masked": rewards})
    for step in run.steps(per_epoch=PER_EPOCH):
        scale = 1 + float(rewards.mean()) * (step.number >= after)
        step.log(loss=learn(fit(model, draw()) * scale, optimizer))


def array_in_fortrans_order(run: Run, after: int) -> None:
    """Keep an array that is stored by columns; its order in memory changes the loss."""
    kept = {"table": np.asfortranarray(np.random.default_rng(0).random((3, 5)))}
    model, optimizer = begin(run, kept=kept)
    for step in run.steps(per_epoch=PER_EPOCH):
        kept["table"] *= 0.99
        first = float(kept["table"].ravel(order="K")[1]) if step.number >= after else 0.0
        step.log(loss=learn(fit(model, draw()) * (1 + first), optimizer))


def view_of_the_data(run: Run, after: int) -> None:
    """Keep the next batch, fetched ahead, which is a view of the data."""
    torch.manual_seed(0)
    corpus = torch.randn(PER_EPOCH * 8 + 8, 8)
    ahead = {"x": corpus[:8]}
    model, optimizer = begin(run, ahead=ahead)
    for step in run.steps(per_epoch=PER_EPOCH):
        x = ahead["x"]
        ahead["x"] = corpus[(start := (step.number + 1) % PER_EPOCH * 8) : start + 8]
        step.log(loss=learn(fit(model, (x, x.sum(1, keepdim=True))), optimizer))


def constant_that_comes_back(run: Run, after: int) -> None:
    """Keep a hidden state, and now and then replace it with a constant of zeros."""
    torch.manual_seed(1)
    zeros = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)
    state: dict[str, Any] = {"hidden": zeros}
    model, optimizer = begin(run, nn.LSTM(8, 1), state=state)
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        out, hidden = model(x[:, None], zeros if step.number % 5 == 0 else state["hidden"])
        state["hidden"] = tuple(each.detach() for each in hidden)
        step.log(loss=learn(F.mse_loss(out[:, 0], y), optimizer))


def memory_map_that_is_kept(run: Run, after: int) -> None:
    """Keep a batch that is a view of a memory map of the data's file."""
    path = Path(os.environ["PROGRAM_FILES"]) / "data.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(0).random((80, 8), dtype=np.float32))
    data = torch.from_numpy(np.lib.format.open_memmap(path, mode="r+"))
    ahead = {"x": data[:8]}
    model, optimizer = begin(run, ahead=ahead)
    for step in run.steps(per_epoch=PER_EPOCH):
        x = ahead["x"]
        ahead["x"] = data[(start := (step.number + 1) % 9 * 8) : start + 8]
        step.log(loss=learn(fit(model, (x, x.sum(1, keepdim=True))), optimizer))


def group_that_is_added(run: Run, after: int) -> None:
    """Unfreeze a layer in a step with add_param_group."""
    model = net()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.001})
        step.log(loss=learn(fit(model, draw()), optimizer))


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)  # type: ignore[no-any-return]


def expanded_buffer(after: int) -> Recipe:
    """Train a model with a buffer that is expanded from one number."""
    return make(model=Expanded())


class Rotary(nn.Module):
    """Computes a table when a larger size comes: a public size, and a tensor beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.size, self.table = nn.Linear(8, 1), 0, None

    def forward(self, x: Tensor, size: int) -> Tensor:
        if size > self.size:
            self.size, self.table = size, torch.arange(size) / size
        return self.linear(x) * (1 + self.table[:size].mean())  # type: ignore[no-any-return, index]


def number_and_tensor_beside_it(run: Run, after: int) -> None:
    """Compute a module's table again when the module's public attribute size grows."""
    model, optimizer = begin(run, Rotary())
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        out = model(x, 3 + (step.number >= after) + step.number % 2)
        step.log(loss=learn(F.mse_loss(out, y), optimizer))


def shared_views(run: Run, after: int) -> None:
    """Keep a buffer, and a view of it under another name."""
    ring = torch.zeros(6, 8)
    kept = {"ring": ring, "last": ring[-1]}
    model, optimizer = begin(run, kept=kept)
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        kept["ring"][step.number % 6] = x[0]
        weight = grow(float(kept["last"].sum().abs()) * (step.number >= after), 0)
        step.log(loss=learn(fit(model, (x, y)) * weight, optimizer))
