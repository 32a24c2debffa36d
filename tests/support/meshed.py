"""Loops and a recipe whose ranks train one model together on a mesh: two data ranks of two tensor-parallel ranks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Recipe, Run

SAMPLES, BATCH = 64, 16
DROPPED = 0.3


class Net(nn.Module):
    """A network that a plan can shard, with dropout where every tensor-parallel rank has the whole activation."""

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8) if has_norm else nn.Identity()  # which the plan of `make_plan` skips
        self.head = nn.Linear(8, 2)
        self.mask = torch.ones(0)

    def forward(self, points: Tensor) -> Tensor:
        """Return logits; shape (n, 2)."""
        for block in self.blocks:
            points = self.norm(points + block(points))
        self.mask = F.dropout(torch.ones_like(points), DROPPED, self.training)
        found: Tensor = self.head(points * self.mask)
        return found


class Block(nn.Module):
    """Two layers: a plan shards the first by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, points: Tensor) -> Tensor:
        """Return activations; shape (n, 8)."""
        found: Tensor = self.down(torch.relu(self.up(points)))
        return found


def make_plan() -> dict[str, Any]:
    """Return the plan by which tensor-parallel ranks share a `Net`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def make_data() -> TensorDataset:
    """Return points and their classes, the same in every process."""
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(points, (points.sum(1) > 0).long())


def tensor_parallel(run: Run, told: str = "data", sampler: str = "", notes: str = "") -> None:
    """Train a `Net` that the loop shards itself: by a plan over two ranks, and by FSDP2 over two pairs of these.

    Args:
        told: the mesh dimension that it passes to ``run.data_parallel``; empty for no call.
        sampler: the ranks among which a ``DistributedSampler`` divides the data: ``world`` or ``data``; empty for a
            loader that Holdfast divides.
        notes: a folder for each rank's samples and masks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.utils.data.distributed import DistributedSampler

    mesh = init_device_mesh(run.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    if told:
        run.data_parallel(mesh[told])
    torch.manual_seed(3)
    model: Any = Net().to(run.device)
    parallelize_module(model, mesh["tensor"], make_plan())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    data = make_data()
    own = DistributedSampler(data) if sampler == "world" else None
    own = DistributedSampler(data, run.data_ranks, run.data_rank) if sampler == "data" else own
    loader = DataLoader(data, BATCH // 2 if own else BATCH, shuffle=own is None, sampler=own)
    for step in run.steps(loader):
        points, _ = learn(run, step, model, optimizer)
        if notes:
            note(Path(notes) / f"{run.rank}.txt", points, model.mask)


def replicas(run: Run, averages: bool = True) -> None:
    """Train a `Net` that two ranks share by a plan alone; the loop averages the gradients of two such pairs itself.

    Args:
        averages: whether it does; otherwise each pair goes its own way.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(run.device.type, (2, 2), mesh_dim_names=("data", "tensor"))
    run.data_parallel(mesh["data"])
    torch.manual_seed(3)
    model = Net().to(run.device)
    parallelize_module(model, mesh["tensor"], make_plan())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)

    def average(gradient: Any) -> None:
        own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        distributed.all_reduce(own, distributed.ReduceOp.SUM, group=mesh["data"].get_group())
        own /= run.data_ranks

    for step in run.steps(DataLoader(make_data(), BATCH, shuffle=True)):
        learn(run, step, model, optimizer, average if averages else None)


def different_optimizers(run: Run) -> None:
    """Step the same model with momentum in some ranks, and without in others."""
    torch.manual_seed(3)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * (run.rank // 2))
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(make_data(), BATCH)):
        learn(run, step, model, optimizer)


def twins(run: Run, whole: bool = False) -> None:
    """Keep two models of equal names in two pairs of ranks, each of which shards its own.

    Args:
        whole: whether the second pair holds the first one's model whole instead.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(run.device.type, (2, 2), mesh_dim_names=("stage", "data"))
    run.data_parallel(mesh["data"])
    stage = run.rank // 2
    torch.manual_seed(3 if whole else stage)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if not (whole and stage):
        fully_shard(model, mesh=mesh["data"])
    run.keep(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.steps(per_epoch=2):
        raise AssertionError("a step begins")


class Experts(nn.Module):
    """A layer of four experts, of which each rank computes one; every rank sends it all of its points."""

    def __init__(self, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 8, 8) / 8, mesh, [Shard(0)]))

    def forward(self, points: Tensor) -> Tensor:
        """Return activations; shape (n, 8)."""
        from torch.distributed.nn.functional import all_gather, reduce_scatter

        gates = torch.cat(all_gather(torch.softmax(self.gate(points), 1)))  # type: ignore[no-untyped-call]
        everywhere = torch.cat(all_gather(points))  # type: ignore[no-untyped-call]
        weight: Any = self.weight
        own = torch.distributed.get_rank()
        found = gates[:, own : own + 1] * (everywhere @ weight.to_local()[0])
        out = torch.empty_like(points)
        parts = [part.contiguous() for part in found.chunk(torch.distributed.get_world_size())]
        summed: Tensor = reduce_scatter(out, parts)  # type: ignore[no-untyped-call]
        return summed


def experts(run: Run) -> None:
    """Train experts that are shared out over all ranks, which each have samples of their own."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(run.device.type, (run.world_size,), mesh_dim_names=("expert",))
    run.data_parallel(mesh)  # an expert's gradient is summed over all samples in the layer itself
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), Experts(mesh), nn.Linear(8, 2)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)

    def average(gradient: Any) -> None:
        if not hasattr(gradient, "to_local"):
            distributed.all_reduce(gradient)
            gradient /= run.world_size

    for step in run.steps(DataLoader(make_data(), BATCH, shuffle=True)):
        learn(run, step, model, optimizer, average)


def learn(
    run: Run, step: Any, model: nn.Module, optimizer: torch.optim.Optimizer,
    average: Callable[[Any], object] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take a step of a loop and return its batch.

    Args:
        average: averages a gradient over the ranks, in place, if nobody else does.
    """
    batch: tuple[Tensor, Tensor] = step.batch
    loss = find_loss(model, batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for each in model.parameters() if average else ():
        average(each.grad)
    run.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    step.log(loss=loss)
    return batch


def note(path: Path, *tensors: Tensor) -> None:
    """Append the bytes of some tensors to a file, as a line."""
    with path.open("a") as file:
        file.write(" ".join(each.detach().cpu().numpy().tobytes().hex() for each in tensors) + "\n")


def parallelize(model: Any, mesh: Any, is_checkpointed: bool = False) -> None:
    """Shard a `Net` over a mesh of the shape ``compute.mesh``."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    if mesh["tensor"].size() > 1:
        parallelize_module(model, mesh["tensor"], make_plan())
    for number, block in enumerate(model.blocks if is_checkpointed else ()):
        model.blocks[number] = checkpoint_wrapper(block)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["replicate", "shard"])


def checkpointed(model: Any, mesh: Any) -> None:
    """Shard a `Net` whose blocks compute their activations again in the backward pass."""
    parallelize(model, mesh, is_checkpointed=True)


def compiled(model: Any, mesh: Any) -> None:
    """Shard a `Net` with compiled blocks: one in its place, and one in a wrapper, which changes its names."""
    model.blocks[0].compile(backend="aot_eager")  # which needs no compiler
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
    parallelize(model, mesh)


def wide(model: Any, mesh: Any) -> None:
    """Shard a `Net` by columns, of which each data rank holds some."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() > 1 else None

    fully_shard(model, mesh=mesh["replicate", "shard"], shard_placement_fn=place)


def rounded(model: Any, mesh: Any) -> None:
    """Shard a `Net` that FSDP2 then computes in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["replicate", "shard"], mp_policy=policy)


def planned(model: Any, mesh: Any) -> None:
    """Shard the blocks of a `Net` by a plan alone, and the rest by FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, mesh["tensor"], make_plan())
    for part in (model.norm, model.head):
        fully_shard(part, mesh=mesh["replicate", "shard"])


def misnamed(model: Any, mesh: Any) -> None:
    """Shard a `Net` by a plan with a layer that it lacks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, mesh["tensor"], {"layers.*.up": ColwiseParallel()})


def half(model: Any, mesh: Any) -> None:
    """Shard the blocks of a `Net`, and forget the rest."""
    from torch.distributed.fsdp import fully_shard

    for part in model.blocks:
        fully_shard(part, mesh=mesh["replicate", "shard"])


def fusing(model: Any, mesh: Any) -> None:
    """Put another layer in the place of a `Net`'s head, and shard the model."""
    from torch.distributed.fsdp import fully_shard

    model.head = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=mesh["replicate", "shard"])


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight = self.first.weight

    def forward(self, points: Tensor) -> Tensor:
        """Return logits; shape (n, 2)."""
        found: Tensor = self.head(self.second(torch.relu(self.first(points))))
        return found


def untying(model: Any, mesh: Any) -> None:
    """Give each layer of a `Tied` a weight of its own, as ``parallelize_module`` does, and shard the model."""
    from torch.distributed.fsdp import fully_shard

    model.second.weight = nn.Parameter(model.first.weight.detach().clone())
    fully_shard(model, mesh=mesh["replicate", "shard"])


def in_shares(run: Run, how: str = "own", notes: str = "") -> None:
    """Train a `Net` by the shares of each step.

    Args:
        how: ``wrapped``, sharded as the configuration says; ``own``, by a plan over two ranks and by FSDP2 over the
            data ranks; ``plan``, by the plan alone; ``grows``, by a plan over half of the ranks.
        notes: a folder for each rank's samples and masks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(3)
    if how == "wrapped":
        model: Any = run.wrap(Net(), parallelize=parallelize)
    else:
        tensor = run.world_size // 2 if how == "grows" else 2
        shape = (run.world_size // tensor, tensor)
        mesh = init_device_mesh(run.device.type, shape, mesh_dim_names=("data", "tensor"))
        run.data_parallel(mesh["data"])
        model = Net().to(run.device)
        parallelize_module(model, mesh["tensor"], make_plan())
        for part in (*model.blocks, model) if how == "own" else ():
            fully_shard(part, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(make_data(), BATCH, shuffle=True)):
        for batch in step.shares():
            loss = find_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            step.log(loss=loss)
            if notes:
                note(Path(notes) / f"{run.rank}.txt", batch[0], model.mask)
        run.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def find_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch."""
    points, classes = batch
    return F.cross_entropy(model(points), classes)


def recipe(how: str = "", notes: str = "") -> Recipe:
    """Build a recipe of a `Net`.

    Args:
        how: the function of this module that shards it; empty for the engine's own way.
        notes: a folder for each rank's samples and masks.
    """
    built = build(Net(), how)
    if notes:
        built.loss = functools.partial(note_loss, Path(notes))
    return built


def note_loss(folder: Path, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch, and note its samples and mask; see `recipe`."""
    loss = find_loss(model, batch)
    note(folder / f"{torch.distributed.get_rank()}.txt", batch[0], model.mask)
    return loss


def tied(how: str) -> Recipe:
    """Build a recipe of a `Tied`; see `recipe`."""
    return build(Tied(), how)


def build(model: nn.Module, how: str) -> Recipe:
    """Build a recipe of a model; see `recipe`."""
    return Recipe(
        model=model,
        data=make_data(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=find_loss,
        batch_size=BATCH,
        clip_norm=1.0,
        parallelize=globals()[how] if how else None,
    )


class RowMeans(torch.optim.SGD):
    """An optimizer with a mean of each row of a parameter, as those have that save memory."""

    def step(self, closure: Any = None) -> Any:
        """Take a step of SGD, and take the means."""
        super().step(closure)
        for each in (one for one in self.param_groups[0]["params"] if one.dim() > 1):
            self.state[each]["rows"] = each.detach().mean(-1, keepdim=True)


def wrapped(run: Run, how: str = "", kind: str = "AdamW") -> None:
    """Train a `Net` in a loop that the configuration shards."""
    torch.manual_seed(3)
    model: Any = run.wrap(Net(), parallelize=globals()[how] if how else None)
    optimizer = (RowMeans if kind == "RowMeans" else torch.optim.AdamW)(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(make_data(), BATCH, shuffle=True)):
        learn(run, step, model, optimizer)
