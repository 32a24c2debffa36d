"""Read a checkpoint into a sharded state: each part is read by one rank, which sends the other ranks their rows."""

import contextlib
import math
from collections.abc import Collection, Mapping

import torch

from holdfast import checkpoint
from holdfast.checkpoint import Header, Payload, Tensor
from holdfast.checkpoint.near import NearReader
from holdfast.checkpoint.partial import PartsReader
from holdfast.checkpoint.streaming import ABREAST, READ_DEPTH, READ_WINDOWS
from holdfast.errors import CheckpointDamaged
from holdfast.journal import Commit
from holdfast.memory import Buffers
from holdfast.state.decoding import shape_of
from holdfast.state.encoding import DTYPES, list_marked
from holdfast.state.shards import ShardedBytes, cut_like
from holdfast.state.tensor_forms import local_of
from holdfast.state.tensors import TensorBytes
from holdfast.store import Store
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.extents import ExchangePlan, Placed
from holdfast.training.sharded.shards import Shards, find_shard
from holdfast.training.sharded.stages import Wanted, is_united, make_absent, take_present


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
    # for each part, and each group of rows in the part: the position of the group's first byte in its tensor
    firsts: list[list[int]] = []
    for header in headers:
        firsts.append([])
        for rows in header.rows:
            dtype, shape = shapes.get(rows.name, (rows.dtype, (0, *rows.shape[1:])))
            if (dtype, shape[1:]) != (rows.dtype, rows.shape[1:]):
                raise CheckpointDamaged(
                    f"the checkpoint's files have rows of the tensor {rows.name} with different dtypes or shapes"
                )
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
    like = find_shard(name, shards)
    is_of_stage = present is not None and is_united(name)
    if present is not None and is_of_stage and name not in present:
        return make_absent(dtype, shape)
    if like is None or tuple(like.shape) != shape:
        whole = torch.empty(shape_of(dtype, shape), dtype=DTYPES[dtype])
        source = ShardedBytes if is_of_stage else TensorBytes
        return Tensor(dtype, shape, (source(whole) if whole.numel() else b"",))
    cut = cut_like(torch.empty_like(local_of(like), dtype=DTYPES[dtype], memory_format=torch.contiguous_format), like)
    return Tensor(dtype, shape, (ShardedBytes(cut) if cut.numel() else b"",))
