"""Training scripts that don't know Holdfast, whose checkpoints it imports, and the loops that go on from them.

Each script trains `TOTAL` steps without a stop and saves on the way: a run that goes on is compared with it.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.recipe import Recipe

PER_EPOCH, TOTAL, BATCH = 6, 24, 8


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    where = torch.rand(PER_EPOCH * BATCH, 2, generator=generator)
    return TensorDataset(where, (where.norm(dim=1) < 0.8).long())


def make(kind: str = "AdamW") -> tuple[nn.Module, Any, Any]:
    """Return a model, an optimizer with two groups, and a schedule, as a script builds them."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = getattr(torch.optim, kind)(groups, lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL)


def take_step(model: nn.Module, optimizer: Any, scheduler: Any, batch: Any) -> torch.Tensor:
    where, labels = batch
    where = where + 0.01 * random.random() + 0.01 * float(np.random.rand())
    loss = nn.functional.cross_entropy(model(where), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.detach()


def states(model: nn.Module, optimizer: Any, scheduler: Any, step: int) -> dict[str, Any]:
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return {
        "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(), "step": step, "rng": rng, "best": {"loss": 0.25}, "epoch": step // 6,
    }  # fmt: skip


def train(stop: int, kind: str, save: Callable[[nn.Module, Any, Any], object]) -> list[float]:
    """Train, save after the step ``stop``, and return the losses of all steps."""
    model, optimizer, scheduler = make(kind)
    losses: list[float] = []
    loader = DataLoader(points(), BATCH, shuffle=True)
    while len(losses) < TOTAL:
        for batch in loader:
            losses.append(float(take_step(model, optimizer, scheduler, batch)))
            if len(losses) == stop:
                save(model, optimizer, scheduler)
    return losses


def with_torch(path: Path, stop: int, kind: str = "AdamW") -> list[float]:
    """Save a dictionary with torch.save."""
    return train(stop, kind, lambda *parts: torch.save(states(*parts, stop), path))


def loop(run: holdfast.Run, kind: str = "AdamW") -> None:
    """The same training as a loop under Holdfast."""
    model, optimizer, scheduler = make(kind)
    best = {"loss": float("inf")}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, best=best)
    for step in run.steps(DataLoader(points(), BATCH, shuffle=True)):
        step.log(loss=take_step(model, optimizer, scheduler, step.batch), best=best["loss"])


def compiled(run: holdfast.Run) -> None:
    """The same model in a module of its own, under another name."""
    model, optimizer, scheduler = make()
    run.keep(net=nn.ModuleDict({"body": model}), optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(DataLoader(points(), BATCH, shuffle=True)):
        step.log(loss=take_step(model, optimizer, scheduler, step.batch))


def scaled(run: holdfast.Run) -> None:
    """The same loop with a gradient scaler of its own, and without the schedule."""
    model, optimizer, _ = make()
    scaler = torch.amp.GradScaler("cpu")
    run.keep(model=model, optimizer=optimizer, scaler=scaler)
    for step in run.steps(DataLoader(points(), BATCH, shuffle=True)):
        assert scaler.get_scale() == 4.0
        loss = nn.functional.cross_entropy(model(step.batch[0]), step.batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss)


def recipe() -> Recipe:
    """The same model, optimizer and schedule as a recipe."""
    model, optimizer, scheduler = make()
    return Recipe(
        model=model, optimizer=optimizer, schedule=scheduler, data=points(), batch_size=BATCH,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )  # fmt: skip


def with_safetensors(path: Path, stop: int) -> list[float]:
    """Save the weights as safetensors in a folder, and the rest beside them."""
    losses = with_torch(path.with_suffix(".pt"), stop)
    saved = torch.load(path.with_suffix(".pt"), weights_only=False)
    path.mkdir()
    save_file(saved.pop("model_state_dict"), path / "model.safetensors")
    torch.save(saved.pop("optimizer_state_dict"), path / "optimizer.pt")
    torch.save(saved.pop("lr_scheduler"), path / "scheduler.pt")
    torch.save(saved, path / "training_state.pt")
    return losses


def with_dcp(path: Path, stop: int) -> list[float]:
    """Save with torch.distributed.checkpoint, the optimizer's state by the parameters' names."""

    def save(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        rest = states(model, optimizer, scheduler, stop)
        weights, moments = get_state_dict(model, optimizer)
        rest |= {"model_state_dict": weights, "optimizer_state_dict": moments}
        dcp.save({"app": rest}, checkpoint_id=path, no_dist=True)

    return train(stop, "AdamW", save)


def with_two_ranks(folder: Path) -> None:
    """Train two steps in two ranks with FSDP2, and save with DCP in ``dcp``, and whole in ``whole.pt``."""
    torch.multiprocessing.spawn(_train_shard, (folder,), nprocs=2)  # type: ignore[no-untyped-call]


def _train_shard(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, _, _ = make()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL)
    where, labels = points().tensors
    for _ in range(2):
        take_step(model, optimizer, scheduler, (where[rank::2], labels[rank::2]))
    for buffer in model.buffers():  # each rank has its own means; of what isn't sharded DCP saves any one rank's
        dist.broadcast(buffer, 0)
    rest = states(model, optimizer, scheduler, 2)
    for options, path in ((None, "dcp"), (StateDictOptions(full_state_dict=True, cpu_offload=True), "whole.pt")):
        weights, moments = get_state_dict(model, optimizer, options=options)
        saved = rest | {"model_state_dict": weights, "optimizer_state_dict": moments}
        if options is None:
            dcp.save({"app": saved}, checkpoint_id=folder / path)
        elif rank == 0:
            torch.save(saved, folder / path)
    dist.barrier()
    # All is saved. As the process ends, gloo now and then destroys a thread that still runs, and aborts it.
    os._exit(0)


def one_group(run: holdfast.Run) -> None:
    """The loop with one group of parameters."""
    model, _, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, best={"loss": 0.0})
    for step in run.steps(DataLoader(points(), BATCH, shuffle=True)):
        step.log(loss=take_step(model, optimizer, scheduler, step.batch))


# ---- accelerate


def prepare_two(accelerator: Any) -> tuple[Any, ...]:
    """Return two models and optimizers, and a loader that draws its order from a seed and the epoch."""
    set_seed(3)
    maker, judge = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    ours = torch.optim.AdamW(judge.parameters(), lr=0.01)
    theirs = torch.optim.SGD(maker.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(points(), BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(ours, step_size=9)
    return tuple(accelerator.prepare(maker, judge, theirs, ours, loader, schedule))


class Average:
    """An object with a state, which accelerate saves if it is registered."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def add(self, value: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * value

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def train_two(accelerator: Any, parts: tuple[Any, ...], average: Average, batch: Any) -> torch.Tensor:
    maker, judge, theirs, ours, _, schedule = parts
    loss: torch.Tensor = nn.functional.cross_entropy(judge(maker(batch[0])), batch[1])
    accelerator.backward(loss)
    for optimizer in (theirs, ours):
        optimizer.step()
    schedule.step()
    for optimizer in (theirs, ours):
        optimizer.zero_grad()
    average.add(loss.detach())
    return loss.detach() + average.mean


def with_accelerate(path: Path, stop: int) -> list[float]:
    """Train with accelerate, save its state after a step, and return the losses of all steps."""
    accelerator = Accelerator(cpu=True)
    parts, average = prepare_two(accelerator), Average()
    accelerator.register_for_checkpointing(average)
    losses: list[float] = []
    while len(losses) < TOTAL:
        for batch in parts[4]:
            losses.append(float(train_two(accelerator, parts, average, batch)))
            if len(losses) == stop:
                accelerator.save_state(str(path))
    return losses


def accelerated(run: holdfast.Run) -> None:
    parts, average = prepare_two(run.accelerator), Average()
    run.accelerator.register_for_checkpointing(average)
    maker, judge, theirs, ours, loader, schedule = parts
    run.keep(maker=maker, judge=judge, theirs=theirs, ours=ours, schedule=schedule)
    for step in run.steps(loader):
        step.log(loss=train_two(run.accelerator, parts, average, step.batch))
