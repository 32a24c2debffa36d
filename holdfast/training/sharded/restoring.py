"""Read a checkpoint into a sharded state: each part is read by one rank, which sends the other ranks their rows."""

import contextlib
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from holdfast import checkpoint
from holdfast.checkpoint import ABREAST, READ_DEPTH, READ_WINDOWS, Header, NearReader, PartsReader, Payload, Tensor
from holdfast.errors import CheckpointDamaged
from holdfast.journal import Commit
from holdfast.memory import Buffers
from holdfast.recipe import Recipe
from holdfast.state.decoding import shape_of
from holdfast.state.encoding import DTYPES, list_marked
from holdfast.state.items import ITEM
from holdfast.state.sharded import ShardedBytes, cut_like
from holdfast.state.tensor_forms import list_shards, local_of, shard_of
from holdfast.state.tensors import TensorBytes
from holdfast.store import Store
from holdfast.training.kept import GRADIENTS
from holdfast.training.left_gradients import UNSYNCED
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.extents import ExchangePlan, Placed
from holdfast.training.sharded.stages import Wanted, is_united, make_absent, take_present
from holdfast.training.unsynced import like_stack

# The sharded tensors by name: ``model.layer.weight`` or ``extras.average.layer.weight``.
Shards = Mapping[str, Any]
PARAMETERS = "parameters"
# The names of unsynced gradients begin with these keys of the extras.
WAITING = f"{GRADIENTS}..{UNSYNCED}."
OF_ITEMS = re.compile(rf"\.{ITEM}(?=\.|$)")


def find_shards(recipe: Recipe) -> Shards:
    """Return the sharded tensors of the model and the extras, by name; empty if there are none.

    Parameters are listed a second time under the names of ``named_parameters``, with the prefix `PARAMETERS`. Their
    names in a ``state_dict`` may differ, because ``checkpoint_wrapper`` leaves its prefix out, and hooks rename or
    split tensors.
    """
    extras = {name: extra.state_dict() for name, extra in recipe.extras.items()}
    modules = {"model": recipe.model} | {f"extras.{name}": each for name, each in recipe.extras.items()}
    parameters = {
        f"{prefix}.{name}": each
        for prefix, module in modules.items()
        if isinstance(module, nn.Module)
        for name, each in module.named_parameters(remove_duplicate=False)
    }
    return dict(list_shards({"model": recipe.model.state_dict(), "extras": extras, PARAMETERS: parameters}))


def find_unplaced(payload: Payload, shards: Shards) -> str:
    """Return the name of a sharded tensor whose present sharding a resume couldn't repeat; empty if there is none.

    Args:
        payload: the state of the model and the optimizer, in the form in which it is saved.
        shards: see `find_shards`.
    """
    for name, tensor in payload.tensors.items():
        if (own := shard_of(tensor)) is not None:
            like = _find_shard(name, shards)
            if like is None or _describe_layout(like) != _describe_layout(own):
                return name
    return ""


def _describe_layout(shard: Any) -> tuple[Any, ...]:
    return shard.device_mesh, shard.placements, shard.shape


def read_shards(
    exchange: Exchange,
    shards: Shards,
    folder: Store,
    commit: Commit,
    buffers: Buffers | None = None,
    near: NearReader | None = None,
    wanted: Wanted | None = None,
) -> Payload:
    """Read and verify a committed state. Each rank keeps only its own rows. All ranks call it together.

    A rank reads the parts that it owns in small windows, so that it needs memory only for its shard and a few windows.
    No save may be in progress, because the threads of a save use the same exchange.

    Args:
        shards: sharded tensors by name; the state's tensors get the same layout over the ranks.
        buffers: memory for the windows; without it, new memory.
        near: copies of the parts, which this rank tries to read first.
        wanted: the names that this rank's stage of a pipeline takes; None to take all names.

    Raises:
        CheckpointDamaged: a file is missing or differs; all ranks raise it, even if only one rank has found the damage.
        StateError: a name is in no rank's stage; all ranks raise it.
    """
    parts = {part.name: part for part in checkpoint.find_parts(commit)}
    sizes = [part.size_bytes for part in parts.values()]
    owners = dict(zip(parts, checkpoint.assign_owners(sizes, exchange.ranks), strict=True))
    own = [part for part in parts.values() if owners[part.name] == exchange.rank]
    found = exchange.each(lambda: checkpoint.read_headers(folder, commit, own))
    headers = {name: header for each in found for name, header in each.items()}
    tree = next(iter(headers[name] for name in parts)).tree
    whole, tree = tree, tree if wanted is None else wanted.narrow(tree)
    present = None if wanted is None else {*list_marked(tree)}
    payload, places = _allocate([headers[name] for name in parts], shards, present)
    placed = dict(zip(parts, places, strict=True))
    holders = exchange.list_holders(placed)
    plans = {
        name: exchange.plan_restore(pieces, holders[name], owners[name], parts[name].size_bytes)
        for name, pieces in placed.items()
    }
    window_bytes = exchange.choose_window(sum(sizes), READ_WINDOWS)
    lane_bytes = READ_DEPTH * window_bytes
    memory = (buffers or Buffers()).take(0, READ_WINDOWS * window_bytes)
    with contextlib.ExitStack() as stack:
        readers: dict[str, PartsReader] = {}
        for lane in range(ABREAST):
            windows = memory[lane * lane_bytes : (lane + 1) * lane_bytes]
            reader = PartsReader(folder, commit, own[lane::ABREAST], windows, window_bytes, near)
            stack.callback(reader.close)
            readers |= {part.name: reader for part in own[lane::ABREAST]}
        for names in checkpoint.list_batches(owners, ABREAST):
            _read_batch(exchange, {name: plans.pop(name) for name in names}, window_bytes, readers)
    if wanted is None:
        return payload
    # check the names only after the tree is verified, because a damaged tree may contain wrong names
    wanted.check(exchange, whole)
    return take_present(payload, tree)


def _read_batch(
    exchange: Exchange, plans: Mapping[str, ExchangePlan], window_bytes: int, readers: Mapping[str, PartsReader]
) -> None:
    """Read several parts, send their rows to the ranks that hold the rows, and verify the parts."""

    def take(name: str, size_bytes: int) -> memoryview:
        return readers[name].take()

    def done(name: str, window: memoryview) -> None:
        readers[name].give_back()

    def check() -> None:
        for name, plan in plans.items():
            if plan.owner == exchange.rank:
                readers[name].check()

    exchange.pass_windows(plans, window_bytes, take, done, is_saved=False)
    exchange.each(check)


def _allocate(
    headers: list[Header], shards: Shards, present: Collection[str] | None
) -> tuple[Payload, list[list[Placed]]]:
    """Return a state with memory for this rank's rows; and for each part, where its bytes belong in this memory.

    Args:
        present: the tensors that this rank's stage of a pipeline takes; None to take all tensors.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    # by part, for each group of rows in the part: the position of the group's first byte in its tensor
    firsts: list[list[int]] = []
    for header in headers:
        firsts.append([])
        for rows in header.rows:
            dtype, shape = shapes.get(rows.name, (rows.dtype, (0, *rows.shape[1:])))
            if (dtype, shape[1:]) != (rows.dtype, rows.shape[1:]):
                raise CheckpointDamaged(f"the files have rows of {rows.name} with different dtypes or shapes")
            before = math.prod(shape) if rows.name in shapes else 0
            firsts[-1].append(checkpoint.size_of(dtype, (before,)))
            shapes[rows.name] = dtype, (shape[0] + rows.shape[0], *shape[1:]) if rows.shape else ()
    tensors = {name: _make(name, dtype, shape, shards, present) for name, (dtype, shape) in shapes.items()}
    places = [
        [
            Placed(rows.position, tensors[rows.name].pieces[0][first : first + rows.size_bytes])
            for rows, first in zip(header.rows, starts, strict=True)
            if rows.size_bytes
        ]
        for header, starts in zip(headers, firsts, strict=True)
    ]
    return Payload(tensors, headers[0].tree), places


def _make(name: str, dtype: str, shape: tuple[int, ...], shards: Shards, present: Collection[str] | None) -> Tensor:
    """Return a tensor with new memory. A sharded tensor gets memory for this rank's rows only."""
    like = _find_shard(name, shards)
    is_of_stage = present is not None and is_united(name)
    if present is not None and is_of_stage and name not in present:
        return make_absent(dtype, shape)
    if like is None or tuple(like.shape) != shape:
        whole = torch.empty(shape_of(dtype, shape), dtype=DTYPES[dtype])
        source = ShardedBytes if is_of_stage else TensorBytes
        return Tensor(dtype, shape, (source(whole) if whole.numel() else b"",))
    cut = cut_like(torch.empty_like(local_of(like), dtype=DTYPES[dtype], memory_format=torch.contiguous_format), like)
    return Tensor(dtype, shape, (ShardedBytes(cut) if cut.numel() else b"",))


def _find_shard(name: str, shards: Shards) -> Any:
    """Return the sharded tensor whose layout a tensor of the checkpoint gets; None if that tensor isn't sharded.

    An optimizer's state of a parameter, such as ``optimizer.state.layer.weight.exp_avg``, is sharded like the
    parameter.

    Args:
        name: the name of the checkpoint's tensor.
    """
    component, _, rest = name.partition(".")
    if component == "extras":  # the name continues with a number: ``extras`` is a list with an item for each rank
        _, _, rest = rest.partition(".")
        if rest.startswith(WAITING):
            parameter = shards.get(f"{PARAMETERS}.model.{rest.removeprefix(WAITING)}")
            return None if parameter is None else like_stack(parameter)
        if rest.startswith(f"{GRADIENTS}."):  # gradients are sharded like their parameters
            return shards.get(f"{PARAMETERS}.model.{rest.removeprefix(f'{GRADIENTS}.')}")
        # A value that has replaced another one in a kept container is saved with a description, as its ``item``.
        return shards.get(f"extras.{rest}", shards.get(f"extras.{OF_ITEMS.sub('', rest)}"))
    if component != "optimizer":
        return shards.get(name)
    parameter = rest.removeprefix("state.")
    while parameter := parameter.rpartition(".")[0]:
        for place in (f"{PARAMETERS}.model.{parameter}", f"{PARAMETERS}.{parameter}"):
            if place in shards:
                return shards[place]
    return None
