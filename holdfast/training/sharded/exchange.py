"""The exchange of a sharded state between ranks: a rank holds rows of tensors, and owns parts of the checkpoint.

A checkpoint consists of parts, which are the same for any sharding. To save, each rank first copies its rows. Then the
owner of a part collects the part's rows from the ranks' copies, while training continues. To restore, the owner sends
each rank the rows that this rank holds. Parts are exchanged in small windows, so that no rank needs memory for a whole
part.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from holdfast.checkpoint import Part
from holdfast.checkpoint.collecting import Collected
from holdfast.checkpoint.parts import File
from holdfast.checkpoint.streaming import WINDOWS, Stream, count_window_bytes
from holdfast.errors import HoldfastError, RunStopped, StateError
from holdfast.memory import Buffers
from holdfast.state.shards import Region, ShardedBytes, TensorHolders, find_holders
from holdfast.store import Store
from holdfast.training.objects import PATIENCE
from holdfast.training.sharded.extents import (
    ExchangePlan,
    Move,
    Placed,
    list_moves,
    make_extent,
    place_pieces,
    take_held,
    view_held,
)

# The key of the windows' buffer in `Buffers`; the parts' buffers have keys from 0.
WINDOWS_NUMBER = -1
# How many results of `list_holders` are remembered. A save, the checks before the save and a restore each need one.
MOST_TOLD = 4

T = TypeVar("T")


class Link(NamedTuple):
    """A process group that copies bytes between ranks.

    Attributes:
        group: the group; None for torch's default group, which training uses.
        device: the device from whose memory the group can send.
    """

    group: Any
    device: torch.device


class Exchange:
    """All ranks of a training, which write one checkpoint together; implements `checkpoint.peers.Peers`.

    Attributes:
        window_bytes: the size of a window; if None, the size of the state decides it.

    Args:
        device: the device whose memory the ranks exchange in training.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the process group for saves. All ranks call it together."""
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self.window_bytes: int | None = None
        self._is_lost = False  # whether an exchange has found another rank lost
        # The results of `list_holders` for tensors whose mesh lacks some ranks. A key has one digest for each rank: of
        # the regions that the rank holds.
        self._partly: dict[tuple[str, ...], dict[tuple[str, int], TensorHolders]] = {}
        # The thread of a save calls collectives while training calls others. It needs its own group, because all ranks
        # have to call the collectives of a group in the same order.
        self.group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        self._in_training, self._beside = Link(None, device), Link(self.group, torch.device("cpu"))

    # ---- agreement: call these methods from the thread of a save, or while no save is in progress

    def decide(self, work: Callable[[], T]) -> T:
        """Call ``work`` in the main rank. Return its result in all ranks, or raise its error in all ranks."""
        found: list[Any] = [self._attempt(work) if self.rank == 0 else None]
        with self._noting_loss():
            distributed.broadcast_object_list(found, 0, group=self.group)
        result: T = _result(found[0])
        return result

    def each(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` in each rank. Return the results by rank, or raise the first error in all ranks."""
        found: list[Any] = [None] * self.ranks
        own = self._attempt(work)
        with self._noting_loss():
            distributed.all_gather_object(found, own, group=self.group)
        return [_result(each) for each in found]

    def _attempt(self, work: Callable[[], T]) -> "T | _Failure":
        try:
            return work()
        except Exception as error:
            # don't exchange results, because other ranks may still be waiting for this rank inside their ``work``
            if self._is_lost:
                raise
            if isinstance(error, HoldfastError):
                return _Failure(error)
            # send this error instead, because the user's error might not be picklable
            return _Failure(RunStopped(f"rank {self.rank}: {type(error).__name__}: {error}"))

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Record that another rank is lost, if the ``with`` block raises an error."""
        try:
            yield
        except Exception:
            self._is_lost = True
            raise

    # ---- rows

    def choose_window(self, size_bytes: int, windows: int) -> int:
        """Return the size of a window in bytes.

        Args:
            size_bytes: the size of the state over all ranks.
            windows: the number of windows that a rank has in memory at the same time.
        """
        return self.window_bytes or count_window_bytes(size_bytes // self.ranks, windows)

    def hold(self, parts: Sequence[Part], owners: Mapping[str, int]) -> "tuple[list[Part], _HeldShards]":
        """Return this rank's bytes of each part, and the exchange that later sends copies of these bytes to the owners.

        The caller has to copy the bytes before the state changes.

        Args:
            owners: the rank that owns each part, by the part's name.
        """
        own: list[Part] = []
        plans: dict[str, ExchangePlan] = {}
        pieces = {part.name: place_pieces(part.pieces) for part in parts}
        known = self.list_holders(pieces)
        for part in parts:
            owner, placed = owners[part.name], pieces[part.name]
            holders = [known[part.name].get(each.position) for each in placed]
            # Piece 0 of a part is the part's header. All ranks have the same header, so the owner uses its own.
            # All other bytes that aren't sharded come from the main rank.
            extents = [
                make_extent(*each, found, [0] if number else [owner], owner)
                for number, (each, found) in enumerate(zip(placed, holders, strict=True))
            ]
            plans[part.name] = ExchangePlan(owner, part.size_bytes, extents)
            held = [
                take_held(each.piece, found, extent.held[self.rank])
                for each, found, extent in zip(placed, holders, extents, strict=True)
                if self.rank in extent.held
            ]
            own.append(Part(part.name, tuple(held)))
        return own, _HeldShards(self, plans, self.choose_window(sum(part.size_bytes for part in parts), WINDOWS))

    def list_holders(self, parts: Mapping[str, Sequence[Placed]]) -> dict[str, dict[int, TensorHolders]]:
        """Return the ranks that hold the tensor of each sharded piece, by the part's name and the piece's position.

        If a tensor's mesh contains all ranks, the mesh shows which rank holds which region. A rank outside the mesh may
        hold the tensor on a different mesh, or not at all. In this case the ranks tell each other which region each of
        them holds. All ranks call it together.

        Raises:
            StateError: the ranks have tensors of different names or shapes; all ranks raise it.
        """
        known: dict[str, dict[int, TensorHolders]] = {name: {} for name in parts}
        own: dict[tuple[str, int], Region | None] = {}
        layout: list[Any] = []
        for name, placed in parts.items():
            for position, piece in placed:
                holders = find_holders(piece.tensor) if isinstance(piece, ShardedBytes) else None
                is_everywhere = holders is not None and len(holders.regions) == self.ranks
                layout.append((name, position, len(piece), holders is not None, is_everywhere))
                if holders is not None:
                    known[name][position] = holders
                    if not is_everywhere:
                        own[name, position] = holders.regions.get(self.rank)
        digests = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (layout, own)]
        told = self.each(lambda: digests)
        if len({alike for alike, _ in told}) > 1:
            raise StateError(
                "the tensors of the ranks have different names or shapes, so one checkpoint can't hold them all",
                hint="give each module, optimizer and extra the same names and shapes in all ranks",
            )
        key = tuple(own_digest for _, own_digest in told)
        if own and key not in self._partly:
            found = self.each(lambda: own)
            if len(self._partly) >= MOST_TOLD:
                self._partly.clear()
            self._partly[key] = {place: _join([each[place] for each in found]) for place in own}
        for name, position in own:
            known[name][position] = self._partly[key][name, position]
        return known

    def plan_restore(
        self, pieces: Iterable[Placed], holders: Mapping[int, TensorHolders], owner: int, size_bytes: int
    ) -> ExchangePlan:
        """Return the plan to restore a part, in which the owner reads the part and sends each rank that rank's bytes.

        Args:
            pieces: the tensors' bytes in the part.
            holders: the ranks that hold the tensor of each sharded piece, by its position.
            size_bytes: the size of the part.
        """
        extents = []
        for position, piece in sorted(pieces, key=lambda each: each.position):
            found = holders.get(position)
            extent = make_extent(position, piece, found, range(self.ranks))
            if self.rank in extent.held:
                extent = dataclasses.replace(extent, memory=view_held(piece, found, extent.held[self.rank]))
            extents.append(extent)
        return ExchangePlan(owner, size_bytes, extents)

    def pass_windows(
        self,
        plans: Mapping[str, ExchangePlan],
        window_bytes: int,
        take: Callable[[str, int], memoryview],
        done: Callable[[str, memoryview], object],
        *,
        is_saved: bool,
    ) -> None:
        """Exchange several parts at the same time, window by window. All ranks call it together.

        Args:
            take: returns memory for a window of a part that this rank owns, given the part's name and the window's
                size. In a restore, the memory already contains the window's bytes.
            done: called with the part's name and this memory after the exchange.
            is_saved: True for a save, in which the owners receive the bytes; False for a restore: they send them.
        """
        longest = max((plan.size_bytes for plan in plans.values()), default=0)
        for start in range(0, longest, window_bytes):
            moves: list[Move] = []
            taken: list[tuple[str, memoryview]] = []
            for name, plan in plans.items():
                stop = min(start + window_bytes, plan.size_bytes)
                window = take(name, stop - start) if plan.owner == self.rank and start < stop else None
                if window is not None:
                    taken.append((name, window))
                moves += list_moves(plan, start, stop, window, self.rank, is_saved=is_saved)
            self.copy(moves, self._beside if is_saved else self._in_training)
            for name, window in taken:
                done(name, window)

    def copy(self, moves: Iterable[Move], link: Link) -> None:
        """Copy bytes between ranks, as ``moves`` says.

        All ranks call it together. Each rank passes the moves in which it takes part, in the same order as the others.
        """
        between: dict[tuple[int, int], list[Move]] = {}
        for move in moves:
            if move.source != move.target:
                between.setdefault((move.source, move.target), []).append(move)
            elif move.source == self.rank:
                assert move.read is not None
                assert move.write is not None
                move.write.copy_(move.read)
        orders, landings = [], []
        for (source, target), together in between.items():
            small = [each for each in together if not each.is_direct]
            for message in (*([each] for each in together if each.is_direct), *([small] if small else [])):
                if self.rank == source:
                    packed = _pack(message, link.device)
                    orders.append(distributed.P2POp(distributed.isend, packed, target, link.group))
                else:
                    landing = _make_landing(message, link.device)
                    landings.append((message, landing))
                    orders.append(distributed.P2POp(distributed.irecv, landing, source, link.group))
        with self._noting_loss():
            for work in distributed.batch_isend_irecv(orders) if orders else ():
                work.wait()
        for message, landing in landings:
            _unpack(message, landing)


class _HeldShards:
    """The exchange of a checkpoint's parts from the ranks' copies to the owners.

    Implements `checkpoint.peers.Held` and `checkpoint.collecting.Exchanged`.

    Args:
        plans: the plan for the exchange of each part, by the part's name.
    """

    def __init__(self, exchange: Exchange, plans: Mapping[str, ExchangePlan], window_bytes: int) -> None:
        self.owners: Mapping[str, int] = {name: plan.owner for name, plan in plans.items()}
        self.sizes: Mapping[str, int] = {name: plan.size_bytes for name, plan in plans.items()}
        self.window_bytes = window_bytes
        self._exchange, self._plans = exchange, plans

    def collect(
        self,
        place: Store,
        files: Sequence[File],
        lines: Mapping[str, bytes],
        pool: ThreadPoolExecutor,
        copies: Mapping[str, memoryview],
        buffers: Buffers,
    ) -> Collected:
        """Return the files that this rank writes to a place; see `checkpoint.peers.Held`."""
        windows = buffers.take(WINDOWS_NUMBER, WINDOWS * self.window_bytes)
        return Collected(place, files, lines, pool, self._exchange, self, copies, windows)

    def stream(self, names: Sequence[str], copies: Mapping[str, memoryview], streams: Mapping[str, Stream]) -> None:
        """Send the bytes of several parts to the parts' owners at the same time. All ranks call it together.

        Args:
            copies: the copy of this rank's bytes of each part, by the part's name.
            streams: the streams that write the parts of which this rank is the owner, by the part's name.
        """
        plans = {name: self._bind(self._plans[name], copies[name]) for name in names}
        self._exchange.pass_windows(
            plans,
            self.window_bytes,
            lambda name, size_bytes: streams[name].take(size_bytes),
            lambda name, window: streams[name].put(window),
            is_saved=True,
        )

    def _bind(self, plan: ExchangePlan, copy: memoryview) -> ExchangePlan:
        """Return the plan with memory for this rank's bytes: views of ``copy``, which contains the bytes in order."""
        extents, end, rank = [], 0, self._exchange.rank
        for extent in plan.extents:
            region = extent.held.get(rank)
            if region is not None:
                start, end = end, end + region.size
                memory = torch.frombuffer(copy[start:end], dtype=torch.uint8).view(region.shape)
                extent = dataclasses.replace(extent, memory=memory)
            extents.append(extent)
        return dataclasses.replace(plan, extents=extents)


def _join(regions: Sequence[Region | None]) -> TensorHolders:
    """Return the ranks that hold a tensor, given each rank's region (None for a rank without the tensor)."""
    return TensorHolders({rank: region for rank, region in enumerate(regions) if region is not None})


def _pack(message: list[Move], device: torch.device) -> Tensor:
    # Move each piece separately, because in a GPU's state some tensors, such as an optimizer's step, are in the host's
    # memory.
    pieces = [move.read.contiguous().view(-1).to(device) for move in message if move.read is not None]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _make_landing(message: list[Move], device: torch.device) -> Tensor:
    """Return memory in which to receive a message: its destination, or a buffer if the destination can't be used."""
    first = message[0].write
    if len(message) == 1 and first is not None and first.is_contiguous() and first.device == device:
        return first.view(-1)
    return torch.empty(sum(move.size_bytes for move in message), dtype=torch.uint8, device=device)


def _unpack(message: list[Move], landing: Tensor) -> None:
    for move, piece in zip(message, torch.split(landing, [each.size_bytes for each in message]), strict=True):
        assert move.write is not None
        if piece.data_ptr() != move.write.data_ptr():
            move.write.copy_(piece.view(move.write.shape))


@dataclass(frozen=True)
class _Failure:
    error: HoldfastError


def _result(found: Any) -> Any:
    if isinstance(found, _Failure):
        raise found.error
    return found
