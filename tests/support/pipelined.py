"""Loops whose ranks hold the stages of a pipeline, trained by the schedules of ``torch.distributed.pipelining``."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from holdfast import Run
from holdfast.training.checksums import describe_components
from holdfast.training.devices import DDP_OPTIONS
from holdfast.training.own_loop.run import loop_of
from tests.support.meshed import BATCH, learn, make_data, note

MICRO_BATCHES = 4
DROPPED = 0.1


class Layers(nn.Module):
    """Some consecutive layers of a model, by their numbers in the whole model.

    Args:
        numbers: the layers to keep.
        count: the number of layers of the whole model.
        local: whether to name them by their numbers in this stage instead.
    """

    def __init__(self, numbers: range, count: int, local: bool = False) -> None:
        super().__init__()
        every = [nn.Linear(8, 8) for _ in range(count)]  # every rank builds all, so that all draw the same numbers
        head = nn.Linear(8, 2)
        first = numbers.start if local else 0
        self.layers = nn.ModuleDict({str(number - first): every[number] for number in numbers})
        self.head = head if numbers.stop == count and not local else nn.Identity()
        self.register_buffer("scale", torch.tensor(0.5))  # which all stages have

    def forward(self, points: Tensor) -> Tensor:
        """Return activations, or of the last stage logits; shape (n, 8) or (n, 2)."""
        for layer in self.layers.values():
            points = points + self.scale * F.dropout(torch.relu(layer(points)), DROPPED, self.training)
        found: Tensor = self.head(points)
        return found


def pipeline(
    run: Run, bounds: tuple[int, ...] = (4,), schedule: str = "Schedule1F1B", told: str = "data", names: str = "global",
    average: str = "loop", layers: int = 8, notes: str = "",
) -> None:  # fmt: skip
    """Train a model of ``layers`` layers whose stages begin at layer 0 and at each of ``bounds``.

    Args:
        told: the mesh dimension that it passes to ``run.data_parallel``; empty for no call.
        names: ``local`` to name each stage's layers from 0.
        average: what averages the gradients of a stage's replicas: the ``loop``, or ``ddp``; empty for nothing.
        notes: a folder for each rank's samples, and for its state at the first step of each process.
    """
    if run.world_size == 1:
        alone(run, layers, notes)
        return
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh

    stages = len(bounds) + 1
    mesh = init_device_mesh(run.device.type, (stages, run.world_size // stages), mesh_dim_names=("stage", "data"))
    if told:
        run.data_parallel(mesh[told])
    number, group = mesh.get_local_rank("stage"), mesh["stage"].get_group()
    edges = [0, *bounds, layers]
    torch.manual_seed(3)
    model = Layers(range(edges[number], edges[number + 1]), layers, local=names == "local").to(run.device)
    if names == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh["data"])
    whole: nn.Module = model
    if average == "ddp":
        whole = nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group(), **DDP_OPTIONS)
    optimizer, scheduler = keep(run, whole)
    shapes: tuple[Tensor, ...] = ()
    if average == "ddp":  # Without shapes, torch's stage would call it in a process's first step: dropout would draw.
        points = torch.zeros(BATCH // run.data_ranks // MICRO_BATCHES, 8, requires_grad=number > 0)
        shapes = points, points[:, : 8 if number < stages - 1 else 2].detach().requires_grad_()
    stage = pipelining.PipelineStage(whole, number, stages, run.device, *shapes, group=group)
    steps: Any = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    for step in run.steps(DataLoader(make_data(), BATCH, shuffle=True)):
        points, classes = step.batch
        if notes:
            note(Path(notes) / f"{run.rank}.txt", points)
            save_state(Path(notes) / f"{run.rank}.pt", model, optimizer)
            note_checksums(Path(notes) / f"{run.rank}.json", run)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        steps.step(
            *([points] if number == 0 else []), **({"target": classes, "losses": losses} if stage.is_last else {})
        )
        for each in model.parameters() if average == "loop" else ():
            assert each.grad is not None
            distributed.all_reduce(each.grad, group=mesh["data"].get_group())
            each.grad /= run.data_ranks
        squares = torch.stack([each.grad.square().sum() for each in model.parameters() if each.grad is not None]).sum()
        distributed.all_reduce(squares, group=group)
        norm = run.clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(norm, squares.sqrt())  # of all stages
        optimizer.step()
        scheduler.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        distributed.broadcast(loss, group_src=stages - 1, group=group)
        step.log(loss=loss)


def alone(run: Run, layers: int, notes: str) -> None:
    """Train the whole model in one rank, without a schedule."""
    model = Layers(range(layers), layers).to(run.device)
    optimizer, scheduler = keep(run, model)
    for step in run.steps(DataLoader(make_data(), BATCH, shuffle=True)):
        save_state(Path(notes) / f"{run.rank}.pt", model, optimizer)
        learn(run, step, model, optimizer)
        scheduler.step()


def keep(run: Run, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Build an optimizer of two groups and a scheduler for a stage, and keep all three."""
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    return optimizer, scheduler


def note_checksums(path: Path, run: Run) -> None:
    """Write the checksums that a line of the trail has, in all detail. All ranks call it together."""
    training = loop_of(run)._training
    assert training is not None
    path.write_text(json.dumps(describe_components(training, in_detail=True)))


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save a stage's tensors by the names that a checkpoint has, unless the file is there."""
    found = {f"model.{name}": each for name, each in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer.state.{name}.{key}": each for key, each in optimizer.state[parameter].items()}
    if not path.exists():
        torch.save(found, path)


def two_parts(run: Run, sizes: tuple[int, ...] = (8, 8), forgets: bool = False, tied: str = "") -> None:
    """Train a part of a model in each of two ranks, by a loss of its own.

    Args:
        sizes: the rows of each rank's part.
        forgets: whether rank 1 changes a kept tensor by a count that is not kept.
        tied: a second name of the shared weight in rank 1, registered before its own; empty for none.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(run.device.type, (2, 1), mesh_dim_names=("stage", "data"))
    run.data_parallel(mesh["data"])
    torch.manual_seed(3)
    model = nn.ModuleDict({"shared": nn.Linear(8, 8, bias=False), str(run.rank): nn.Embedding(sizes[run.rank], 8)})
    if tied and run.rank == 1:
        first = nn.Linear(8, 8, bias=False)
        first.weight = model["shared"].weight
        model = nn.ModuleDict({tied: first, "shared": model["shared"], "1": model["1"]})
    model.to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"sum": torch.zeros(4)}
    run.keep(model=model, optimizer=optimizer, state=state)
    count = 0.0
    for step in run.steps(DataLoader(torch.ones(64, 8), BATCH)):
        optimizer.zero_grad()
        own = model[str(run.rank)](torch.zeros(1, dtype=torch.int64, device=run.device))
        loss = model["shared"](step.batch.to(run.device)).square().mean() + own.square().mean()
        loss.backward()
        distributed.all_reduce(model["shared"].weight.grad)
        norm = run.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        if forgets and run.rank == 1:
            count += 1.0
            state["sum"] += count
        step.log(loss=run.accelerator.reduce(loss.detach(), "mean"), norm=norm, squares=own_norm(model, run))


def own_norm(model: nn.ModuleDict, run: Run) -> Tensor:
    """Return the norm of the gradient of both parts, in which the shared weight counts once."""
    own = model[str(run.rank)].weight.grad.square().sum()
    distributed.all_reduce(own)
    found: Tensor = (own + model["shared"].weight.grad.square().sum()).sqrt()
    return found
