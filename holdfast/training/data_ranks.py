"""The data-parallel rank: the number that is equal in ranks that train the same samples, and different in all others.

Without tensor, pipeline or context parallelism every rank trains different samples. With such parallelism the ranks of
a group compute one model together, and need the same samples and the same random numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import Tensor, distributed, nn

from holdfast.errors import RecipeError
from holdfast.state import is_sharded
from holdfast.training import objects

HINT = "call run.data_parallel(mesh) before the loop, with the mesh dimensions whose ranks get different samples"


@dataclass(frozen=True)
class DataRanks:
    """The data-parallel rank of every rank.

    Attributes:
        numbers: the data ranks, by rank. Ranks of one data rank train the same samples, with the same random numbers.
        rank: this rank's number.
        meshes: for each part of the model, the ranks that hold this part, in the order of their data ranks. These
            ranks train different samples.
    """

    numbers: tuple[int, ...]
    rank: int
    meshes: tuple[tuple[int, ...], ...]

    @property
    def number(self) -> int:
        """Return this rank's data rank."""
        return self.numbers[self.rank]

    @property
    def count(self) -> int:
        """Return the number of data ranks."""
        return len(set(self.numbers))

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the ranks that hold the same part of the model as this rank, in the order of their data ranks."""
        return next(each for each in self.meshes if self.rank in each)

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first of its data rank."""
        return self.numbers.index(self.number) == self.rank

    def make_group(self) -> Any:
        """Return a process group of this rank's `peers`; None if these are all ranks. All ranks call it together."""
        if len(self.meshes) == 1:
            return None
        groups = {peers: distributed.new_group(list(peers)) for peers in self.meshes}
        return groups[self.peers]


def separate(accelerator: Accelerator) -> DataRanks:
    """Return the data ranks of ranks that all train different samples: each rank's data rank is its own number."""
    every = tuple(range(accelerator.num_processes))
    return DataRanks(every, int(accelerator.process_index), (every,))


def gather_data_ranks(mesh: Any, accelerator: Accelerator) -> DataRanks:
    """Return the data ranks that follow from a mesh. All ranks call it together.

    Args:
        mesh: a torch ``DeviceMesh`` of the data-parallel dimensions alone, with any number of dimensions.

    Raises:
        RecipeError: `mesh` isn't a DeviceMesh, doesn't contain this rank, or has groups of different sizes.
    """
    rank = int(accelerator.process_index)
    ranks = _list_ranks(mesh, rank)
    found = objects.gather(ranks) if accelerator.num_processes > 1 else [ranks]
    pairs = [(each.index(number), len(each)) for number, each in enumerate(found)]
    check_groups(pairs)
    return DataRanks(tuple(number for number, _ in pairs), rank, tuple(dict.fromkeys(found)))


def _list_ranks(mesh: Any, rank: int) -> tuple[int, ...]:
    members = getattr(mesh, "mesh", None)
    if members is None:
        raise RecipeError(
            f"run.data_parallel(...): expected a DeviceMesh, found a {type(mesh).__name__}",
            hint='call run.data_parallel(mesh["replicate", "shard"]), with the names of your mesh\'s data-parallel '
            "dimensions",
        )
    ranks: list[int] = members.flatten().tolist()
    if rank not in ranks:
        raise RecipeError(f"run.data_parallel(...): rank {rank} is not in the mesh of the ranks {ranks}", hint=HINT)
    return tuple(ranks)


def check_groups(found: Sequence[tuple[int, int]]) -> None:
    """Raise RecipeError unless all data ranks have equally many ranks.

    Args:
        found: for each rank, its data rank and the number of data ranks in its mesh.
    """
    sizes = {each: found.count(each) for each in found}
    counts = sorted({count for _, count in found})
    if len(counts) > 1 or len(sizes) != counts[0] or len(set(sizes.values())) > 1:
        shown = ", ".join(f"{number} of {count}" for number, count in found)
        raise RecipeError(
            "run.data_parallel(...): each data rank needs the same number of ranks, but the ranks 0, 1, ... have the "
            f"data ranks {shown}"
        )


def check_model(model: nn.Module, data: DataRanks, *, is_told: bool) -> None:
    """Raise RecipeError if the layout of a model shows that the data ranks are wrong.

    Args:
        is_told: whether the program itself has set its data ranks. If so, ranks that compute with a tensor together may
            train different samples, as with expert parallelism.
    """
    for name, together, apart in _list_groups(model):
        if not is_told and len({data.numbers[each] for each in together}) > 1:
            raise RecipeError(
                f"ranks {_join(together)} hold pieces of the tensor {name!r} and compute with it together, so they "
                "need the same samples, but each would get different samples and random numbers",
                hint=HINT,
            )
        if len(apart) > 1 and data.count > 1 and len({data.numbers[each] for each in apart}) == 1:
            raise RecipeError(
                f"ranks {_join(apart)} average the gradient of {name!r}, but would all train the same samples",
                hint=HINT,
            )


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _list_groups(model: nn.Module) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield each parameter's name, the ranks that compute with it together, and the ranks that average its gradient.

    FSDP2 gathers a parameter before its use, so the ranks of FSDP2 don't compute together. If another plan, such as
    tensor parallelism, has sharded the parameter before FSDP2, the mesh's last dimension belongs to that plan.
    """
    if not any(map(is_sharded, model.parameters())):
        return
    from torch.distributed.fsdp import FSDPModule

    gathered = {
        id(each) for module in model.modules() if isinstance(module, FSDPModule) for each in module.parameters()
    }
    for name, each in model.named_parameters():
        if not is_sharded(each):
            continue
        tensor: Any = each
        mesh = tensor.device_mesh
        if id(each) not in gathered:
            yield name, mesh.mesh.flatten().tolist(), []
        elif has_plan(each):
            yield name, mesh.mesh[tuple(mesh.get_coordinate()[:-1])].tolist(), find_grid(each).flatten().tolist()
        else:
            yield name, [], mesh.mesh.flatten().tolist()


def has_plan(parameter: Any) -> bool:
    """Return whether another plan, such as tensor parallelism, has sharded a parameter before FSDP2.

    If so, the last dimension of the parameter's mesh belongs to that plan. FSDP2 alone uses a mesh of one dimension, or
    for HSDP of two dimensions, of which the first counts the replicas.
    """
    mesh: Any = parameter.device_mesh
    return bool(mesh.ndim > 2 or (mesh.ndim == 2 and not parameter.placements[0].is_replicate()))


def find_grid(parameter: Any) -> Tensor:
    """Return the ranks among which FSDP2 reduces a parameter's gradient, as a tensor of shape (replicas, shards)."""
    mesh: Any = parameter.device_mesh
    ranks: Tensor = mesh.mesh[..., mesh.get_coordinate()[-1]] if has_plan(parameter) else mesh.mesh
    return ranks.reshape(-1, ranks.shape[-1])
