"""The exchange of a sharded state between the rows that each rank holds and the parts that each rank owns.

A checkpoint's parts are the same for any sharding. To save, each rank first copies its rows; then the owner of a part
collects them from the ranks' copies while training goes on. To restore, the owner sends each rank the rows that this
rank holds. Parts pass through small windows, so that no rank needs memory for a whole part.
"""

import bisect
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from holdfast.checkpoint import Part, Piece, Stream, count_window_bytes
from holdfast.errors import HoldfastError, RunStopped, StateError
from holdfast.state.sharded import Region, ShardedBytes, cut_boxes, local_of, see_bytewise
from holdfast.state.tensors import TensorBytes

if TYPE_CHECKING:
    from holdfast.training.build import Training

# So many bytes are sent by themselves, without a copy; fewer of a window are sent together.
DIRECT_BYTES = 2**16
# Waiting for a slow store is no error; a rank that dies closes its connections, which is noticed at once.
PATIENCE = datetime.timedelta(days=7)

T = TypeVar("T")


class Placed(NamedTuple):
    """A piece of a part, with the position of its first byte in the part."""

    position: int
    piece: Piece


@dataclass(frozen=True)
class Extent:
    """A piece of a part as bytes: where it is, and which of its bytes the ranks hold that exchange them.

    Attributes:
        position: its first byte in the part.
        start: its first byte in its tensor, row by row.
        shape: the shape of its tensor in bytes; see `see_bytewise`.
        held: the region of the piece that each of these ranks holds.
        memory: this rank's region, as bytes of its shape; None if it holds none.
    """

    position: int
    size_bytes: int
    start: int
    shape: tuple[int, ...]
    held: Mapping[int, Region]
    memory: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """The exchange of one part between its owner and the ranks that hold its bytes.

    Attributes:
        extents: the part's pieces, in their order.
    """

    owner: int
    size_bytes: int
    extents: Sequence[Extent]

    def list_between(self, start: int, stop: int) -> Sequence[Extent]:
        """Return the pieces that have bytes between two positions in the part."""
        first = bisect.bisect_right(self.extents, start, key=lambda each: each.position + each.size_bytes)
        return self.extents[first : bisect.bisect_left(self.extents, stop, key=lambda each: each.position)]


@dataclass(frozen=True)
class Move:
    """Bytes to copy from one rank to another.

    Attributes:
        read: the bytes to send; None in other ranks than the source.
        write: the memory to copy them to; None in other ranks than the target.
    """

    source: int
    target: int
    size_bytes: int
    read: Tensor | None
    write: Tensor | None

    @property
    def is_direct(self) -> bool:
        """Return whether the bytes are sent by themselves."""
        return self.size_bytes >= DIRECT_BYTES


class Link(NamedTuple):
    """The process group that copies bytes between the ranks, None for training's own, and whose memory it sends."""

    group: Any
    device: torch.device


class Exchange:
    """All ranks of a training, as the `checkpoint.peers.Peers` that write one checkpoint together.

    Attributes:
        window_bytes: the size of a window; None chooses it by the size of the state.

    Args:
        device: the device whose memory the ranks exchange in training.
    """

    def __init__(self, device: torch.device) -> None:
        """All ranks call it together."""
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self.window_bytes: int | None = None
        self._is_lost = False  # whether another rank is
        # The thread of a save agrees and exchanges beside training, whose collectives have an order of their own.
        self.group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        self._in_training, self._beside = Link(None, device), Link(self.group, torch.device("cpu"))

    # ---- agreement, from the thread of a save, or while no save is in progress

    def decide(self, work: Callable[[], T]) -> T:
        """Let the main rank work, and return its result in all ranks, or raise its error in all ranks."""
        found: list[Any] = [self._attempt(work) if self.rank == 0 else None]
        with self._noting_loss():
            distributed.broadcast_object_list(found, 0, group=self.group)
        result: T = _result(found[0])
        return result

    def each(self, work: Callable[[], T]) -> list[T]:
        """Let each rank work, and return the results by rank, or raise the first error in all ranks."""
        found: list[Any] = [None] * self.ranks
        own = self._attempt(work)
        with self._noting_loss():
            distributed.all_gather_object(found, own, group=self.group)
        return [_result(each) for each in found]

    def _attempt(self, work: Callable[[], T]) -> "T | _Failure":
        try:
            return work()
        except Exception as error:
            if self._is_lost:  # the others can't be told: some may wait for this rank in the middle of their work
                raise
            if isinstance(error, HoldfastError):
                return _Failure(error)
            return _Failure(RunStopped(f"rank {self.rank}: {type(error).__name__}: {error}"))  # fit to be sent

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Note that an error in the block means the loss of another rank."""
        try:
            yield
        except Exception:
            self._is_lost = True
            raise

    # ---- rows

    def choose_window(self, size_bytes: int) -> int:
        """Return the size of the windows for a state, both in bytes."""
        return self.window_bytes or count_window_bytes(size_bytes // self.ranks)

    def hold(self, parts: Sequence[Part], owners: Mapping[str, int]) -> "tuple[list[Part], Held]":
        """Return this rank's bytes of each part, which are to be copied before the state changes, and their exchange.

        Args:
            owners: the rank that owns each part, by the part's name.
        """
        own: list[Part] = []
        plans: dict[str, Plan] = {}
        for part in parts:
            owner, placed = owners[part.name], place(part.pieces)
            # Every rank has made the same header, and has the bytes that are not cut; those are the main rank's.
            extents = [_describe(*placed[0], [owner]), *(_describe(*each, [0], owner) for each in placed[1:])]
            plans[part.name] = Plan(owner, part.size_bytes, extents)
            pairs = zip(placed, extents, strict=True)
            held = [_take_held(each, extent.held[self.rank]) for (_, each), extent in pairs if self.rank in extent.held]
            own.append(Part(part.name, tuple(held)))
        return own, Held(self, plans, self.choose_window(sum(part.size_bytes for part in parts)))

    def plan_restore(self, pieces: Iterable[Placed], owner: int, size_bytes: int) -> Plan:
        """Return the exchange of a part that its owner reads, with all ranks whose tensors have bytes of it.

        Args:
            pieces: the tensors' bytes in the part.
            size_bytes: the size of the part.
        """
        extents = []
        for position, piece in sorted(pieces, key=lambda each: each.position):
            extent = _describe(position, piece, range(self.ranks))
            if self.rank in extent.held:
                extent = dataclasses.replace(extent, memory=_view_held(piece, extent.held[self.rank]))
            extents.append(extent)
        return Plan(owner, size_bytes, extents)

    def pass_windows(
        self,
        plans: Mapping[str, Plan],
        window_bytes: int,
        take: Callable[[str, int], memoryview],
        done: Callable[[str, memoryview], object],
        *,
        is_saved: bool,
    ) -> None:
        """Exchange some parts window by window, side by side. All ranks call it together.

        Args:
            take: returns memory for a window of a part that this rank owns, or with its bytes, by the part's name and
                the window's size.
            done: called with this memory after the exchange.
            is_saved: whether the owners get the bytes; otherwise they send them.
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
                moves += self._list_moves(plan, start, stop, window, is_saved=is_saved)
            self.copy(moves, self._beside if is_saved else self._in_training)
            for name, window in taken:
                done(name, window)

    def _list_moves(
        self, plan: Plan, start: int, stop: int, window: memoryview | None, *, is_saved: bool
    ) -> Iterator[Move]:
        """Yield this rank's moves between a window of a part and the ranks that hold its bytes.

        Args:
            start, stop: the window's place in the part.
            window: the window's memory; None in other ranks than the owner.
            is_saved: whether the owner gets the bytes; otherwise it sends them.
        """
        image = None if window is None else torch.frombuffer(window, dtype=torch.uint8)
        for extent in plan.list_between(start, stop):
            first, last = max(start, extent.position), min(stop, extent.position + extent.size_bytes)
            place = first - start
            offset = extent.start - extent.position
            for box in cut_boxes(extent.shape, offset + first, offset + last):
                placed = None if image is None else image[place : place + box.size].view(box.shape)
                place += box.size
                for holder, region in extent.held.items():
                    if self.rank in (holder, plan.owner) and (common := box.intersect(region)).size:
                        mine = its = None
                        if holder == self.rank:
                            assert extent.memory is not None
                            mine = extent.memory[common.within(region)]
                        if placed is not None:
                            its = placed[common.within(box)]
                        ends = (holder, plan.owner) if is_saved else (plan.owner, holder)
                        memory = (mine, its) if is_saved else (its, mine)
                        yield Move(*ends, common.size, *memory)

    def copy(self, moves: Iterable[Move], link: Link) -> None:
        """Carry out some moves. All ranks call it, each with the moves that it takes part in, in the same order."""
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


class Held:
    """The exchange of the bytes that each rank has copied of a checkpoint's parts; a `checkpoint.peers.Held`.

    Args:
        plans: the exchange of each part, by the part's name.
    """

    def __init__(self, exchange: Exchange, plans: Mapping[str, Plan], window_bytes: int) -> None:
        self.owners: Mapping[str, int] = {name: plan.owner for name, plan in plans.items()}
        self.sizes: Mapping[str, int] = {name: plan.size_bytes for name, plan in plans.items()}
        self.window_bytes = window_bytes
        self._exchange, self._plans = exchange, plans

    def check(self) -> None:
        """Raise StateError in all ranks if they have tensors of other names or shapes. All ranks call it together."""
        layout = [
            (name, plan.owner, *((each.size_bytes, each.shape) for each in plan.extents[1:]))
            for name, plan in self._plans.items()
        ]
        if len({*self._exchange.each(lambda: hashlib.sha256(repr(layout).encode()).hexdigest())}) > 1:
            raise StateError(
                "the ranks have different states, of which one checkpoint can't have a share of each",
                hint="give each module, optimizer and extra the same names and shapes in all ranks",
            )

    def stream(self, names: Sequence[str], copies: Mapping[str, memoryview], streams: Mapping[str, Stream]) -> None:
        """Let the owners of some parts collect their bytes, all parts side by side. All ranks call it together.

        Args:
            copies: the copy of this rank's bytes of each part.
            streams: where the bytes of each part go that this rank owns.
        """
        plans = {name: self._bind(self._plans[name], copies[name]) for name in names}
        self._exchange.pass_windows(
            plans,
            self.window_bytes,
            lambda name, size_bytes: streams[name].take(size_bytes),
            lambda name, window: streams[name].put(window),
            is_saved=True,
        )

    def _bind(self, plan: Plan, copy: memoryview) -> Plan:
        """Return a plan whose memory is in the copy of this rank's bytes."""
        extents, end, rank = [], 0, self._exchange.rank
        for extent in plan.extents:
            region = extent.held.get(rank)
            if region is not None:
                start, end = end, end + region.size
                memory = torch.frombuffer(copy[start:end], dtype=torch.uint8).view(region.shape)
                extent = dataclasses.replace(extent, memory=memory)
            extents.append(extent)
        return dataclasses.replace(plan, extents=extents)


def exchange_of(training: "Training") -> Exchange:
    """Return the exchange between the ranks of a training. All ranks call it together."""
    if training.exchange is None:
        training.exchange = Exchange(training.accelerator.device)
    return training.exchange


def place(pieces: Iterable[Piece]) -> list[Placed]:
    """Return the pieces of a part that aren't empty, each with its position."""
    pieces = list(pieces)
    ends = itertools.accumulate(map(len, pieces), initial=0)
    return [Placed(position, piece) for position, piece in zip(ends, pieces, strict=False) if len(piece)]


def _describe(position: int, piece: Any, everywhere: Sequence[int], owner: int | None = None) -> Extent:
    """Return a piece as an extent.

    Args:
        everywhere: the ranks that exchange the bytes of a piece that is not cut over the ranks.
        owner: the owner that collects the piece, each byte from one rank. None if all ranks that hold bytes get them.
    """
    size_bytes = len(piece)
    if not isinstance(piece, ShardedBytes):
        whole = Region((0,), (size_bytes,))
        return Extent(position, size_bytes, 0, whole.shape, dict.fromkeys(everywhere, whole))
    shape, held = _describe_cut(
        piece.tensor.dtype.itemsize, tuple(piece.tensor.shape), piece.tensor.device_mesh,
        tuple(piece.tensor.placements), piece.start, size_bytes, owner,
    )  # fmt: skip
    return Extent(position, size_bytes, piece.start, shape, held)


@functools.lru_cache(maxsize=2**14)  # a run has the same tensors at every save, and training waits for this
def _describe_cut(
    item_bytes: int, whole: tuple[int, ...], mesh: Any, placements: tuple[Any, ...],
    start: int, size_bytes: int, owner: int | None,
) -> tuple[tuple[int, ...], Mapping[int, Region]]:  # fmt: skip
    shape, regions = see_bytewise(item_bytes, whole, mesh, placements)
    (rows,) = cut_boxes(shape, start, start + size_bytes)
    chosen = regions if owner is None else _once(regions, owner)
    common = {rank: rows.intersect(region) for rank, region in chosen.items()}
    return shape, {rank: region for rank, region in common.items() if region.size}


def _once(regions: Mapping[int, Region], owner: int) -> dict[int, Region]:
    """Return each region once: with the owner as its holder, if it holds it, or else with the first rank that does."""
    holders = {region: rank for rank, region in reversed(list(regions.items()))}
    if owner in regions:
        holders[regions[owner]] = owner
    return {rank: region for region, rank in holders.items()}


def _take_held(piece: Any, region: Region) -> Piece:
    """Return the bytes of a piece that this rank holds."""
    return TensorBytes(_view_held(piece, region)) if isinstance(piece, ShardedBytes) else piece


def _view_held(piece: Any, region: Region) -> Tensor:
    """Return this rank's region of a piece, as bytes of its shape: a view, if this rank's memory is contiguous."""
    if not isinstance(piece, ShardedBytes):
        return _to_bytes(piece.tensor)
    tensor = piece.tensor
    _, regions = see_bytewise(tensor.dtype.itemsize, tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
    local = regions[distributed.get_rank()]
    return _to_bytes(local_of(piece.tensor)).view(local.shape)[region.within(local)]


def _to_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _pack(message: list[Move], device: torch.device) -> Tensor:
    # Each by itself: on a GPU, a part also has tensors that are in the host's memory, such as an optimizer's step.
    pieces = [move.read.contiguous().view(-1).to(device) for move in message if move.read is not None]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _make_landing(message: list[Move], device: torch.device) -> Tensor:
    """Return memory for a message: its destination, if the message can be written there."""
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
