"""The exchange of a sharded state between the rows that each rank holds and the parts that each rank owns.

A checkpoint's parts are the same for any sharding. To save, the owner of a part collects the rows that other ranks
hold; to restore, it sends each rank the rows that this rank holds. One part of each owner is exchanged at a time, and
large rows go straight from one rank's memory to the other's, so that no rank needs memory for the whole state.
"""

import datetime
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from holdfast.checkpoint import Part, Piece, in_memory
from holdfast.errors import HoldfastError, RunStopped, StateError
from holdfast.state.sharded import Region, ShardedBytes, list_regions, local_of
from holdfast.state.tensors import TensorBytes

if TYPE_CHECKING:
    from holdfast.training.build import Training

# Rows of this size or more are sent by themselves, without a copy; smaller ones of a part are sent together.
DIRECT_BYTES = 2**16
# Waiting for a slow store is no error; a rank that dies closes its connections, which is noticed at once.
PATIENCE = datetime.timedelta(days=7)

T = TypeVar("T")


class Placed(NamedTuple):
    """A piece of a part, with the position of its first byte in the part."""

    position: int
    piece: Piece


@dataclass(frozen=True)
class Move:
    """Bytes to copy from one rank to another.

    Attributes:
        is_direct: whether the bytes are sent without a copy: they are many, and contiguous at both ends.
        read: the bytes to send; None in other ranks than the source.
        write: the memory to copy them to; None in other ranks than the target.
    """

    source: int
    target: int
    size_bytes: int
    is_direct: bool
    read: Tensor | None
    write: Tensor | None


class Exchange:
    """All ranks of a training, as the `checkpoint.peers.Peers` that write one checkpoint together.

    Args:
        device: the device whose memory the ranks exchange in training.
    """

    def __init__(self, device: torch.device) -> None:
        """All ranks call it together."""
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self._device = device
        # The save's threads agree beside training, whose collectives have an order of their own.
        self.group = distributed.new_group(backend="gloo", timeout=PATIENCE)

    # ---- agreement, also from the threads of a save

    def decide(self, work: Callable[[], T]) -> T:
        """Let the main rank work, and return its result in all ranks, or raise its error in all ranks."""
        found: list[Any] = [_attempt(work) if self.rank == 0 else None]
        distributed.broadcast_object_list(found, 0, group=self.group)
        result: T = _result(found[0])
        return result

    def each(self, work: Callable[[], T]) -> list[T]:
        """Let each rank work, and return the results by rank, or raise the first error in all ranks."""
        found: list[Any] = [None] * self.ranks
        distributed.all_gather_object(found, _attempt(work), group=self.group)
        return [_result(each) for each in found]

    # ---- rows, from the training's own thread

    def collect(self, parts: Sequence[Part], owners: Sequence[int], images: Mapping[str, memoryview]) -> None:
        """Fill the images of this rank's parts with the bytes that all ranks hold of them. All ranks call it together.

        Bytes that every rank has are the main rank's.

        Raises:
            StateError: the ranks have tensors of other names or shapes.
        """
        layout = [(part.name, owner, *map(len, part.pieces[1:])) for part, owner in zip(parts, owners, strict=True)]
        if len({*self.each(lambda: hashlib.sha256(repr(layout).encode()).hexdigest())}) > 1:
            raise StateError(
                "the ranks have different states, of which one checkpoint can't have a share of each",
                hint="give each module, optimizer and extra the same names and shapes in all ranks",
            )
        for turn in take_turns(parts, owners):
            self.copy(move for part, owner in turn for move in self._collecting(part, owner, images.get(part.name)))

    def _collecting(self, part: Part, owner: int, image: memoryview | None) -> Iterator[Move]:
        (_, header), *others = place(part.pieces)
        if image is not None:
            image[: len(header)] = in_memory(header)  # every rank has made the same
        for position, piece in others:
            sources = _once(list_regions(piece.tensor), owner) if isinstance(piece, ShardedBytes) else {0: None}
            for source, region in sources.items():
                if self.rank in (source, owner):
                    yield from self._move(position, piece, region, image, holder=source, owner=owner, is_saved=True)

    def list_deliveries(self, pieces: Iterable[Placed], owner: int, image: memoryview | None) -> Iterator[Move]:
        """Yield this rank's moves among those that copy a part's bytes to the tensors of all ranks.

        Args:
            pieces: where the tensors' bytes are in the part.
            image: the part's bytes; None in other ranks than the owner.
        """
        for position, piece in pieces:
            everywhere: dict[int, Region | None] = dict.fromkeys(range(self.ranks))
            holders = list_regions(piece.tensor) if isinstance(piece, ShardedBytes) else everywhere
            for holder, region in holders.items():
                if self.rank in (holder, owner):
                    yield from self._move(position, piece, region, image, holder=holder, owner=owner, is_saved=False)

    def _move(
        self, position: int, piece: Any, region: Region | None, image: memoryview | None,
        *, holder: int, owner: int, is_saved: bool,
    ) -> Iterator[Move]:  # fmt: skip
        """Yield the move between a part and the region that one rank holds, if they have bytes in common."""
        is_whole, held = True, None
        if isinstance(piece, ShardedBytes):
            assert region is not None
            dtype, rows = piece.tensor.dtype, piece.rows
            common = rows.intersect(region)
            is_whole = common.shape[1:] == rows.shape[1:]
            size_bytes = common.size * dtype.itemsize
            if holder == self.rank and size_bytes:
                held = local_of(piece.tensor)[common.within(region)]
            placed = _view(image, position, dtype, rows.shape, rows.size)
            placed = placed[common.within(rows)] if placed is not None and size_bytes else None
        else:
            size_bytes = len(piece)
            held = _to_bytes(piece) if holder == self.rank and size_bytes else None
            placed = _view(image, position, torch.uint8, (size_bytes,), size_bytes)
        if size_bytes:
            is_direct = is_whole and size_bytes >= DIRECT_BYTES
            if is_saved:
                yield Move(holder, owner, size_bytes, is_direct, held, placed)
            else:
                yield Move(owner, holder, size_bytes, is_direct, placed, held)

    def copy(self, moves: Iterable[Move]) -> None:
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
                    orders.append(distributed.P2POp(distributed.isend, self._pack(message), target))
                else:
                    landing = self._make_landing(message)
                    landings.append((message, landing))
                    orders.append(distributed.P2POp(distributed.irecv, landing, source))
        for work in distributed.batch_isend_irecv(orders) if orders else ():
            work.wait()
        for message, landing in landings:
            _unpack(message, landing)

    def _pack(self, message: list[Move]) -> Tensor:
        # Each by itself: on a GPU, a part also has tensors that are in the host's memory, such as an optimizer's step.
        reads = [move.read.contiguous() for move in message if move.read is not None]
        pieces = [_flatten(each).to(self._device) for each in reads]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _make_landing(self, message: list[Move]) -> Tensor:
        """Return memory for a message: its destination, if the message can be written there."""
        first = message[0].write
        if message[0].is_direct and first is not None and first.is_contiguous() and first.device == self._device:
            return _flatten(first)
        return torch.empty(sum(move.size_bytes for move in message), dtype=torch.uint8, device=self._device)


def exchange_of(training: "Training") -> Exchange:
    """Return the exchange between the ranks of a training. All ranks call it together."""
    if training.exchange is None:
        training.exchange = Exchange(training.accelerator.device)
    return training.exchange


def place(pieces: Iterable[Piece]) -> list[Placed]:
    """Return the pieces of a part, each with its position."""
    pieces = list(pieces)
    ends = itertools.accumulate(map(len, pieces), initial=0)
    return list(map(Placed, ends, pieces))


def take_turns(parts: Iterable[T], owners: Iterable[int]) -> Iterator[list[tuple[T, int]]]:
    """Yield parts with their owners, in each turn at most one of each owner."""
    by_owner: dict[int, list[tuple[T, int]]] = {}
    for part, owner in zip(parts, owners, strict=True):
        by_owner.setdefault(owner, []).append((part, owner))
    for turn in itertools.zip_longest(*by_owner.values()):
        yield [each for each in turn if each is not None]


def _once(regions: Mapping[int, Region], owner: int) -> dict[int, Region]:
    """Return each region once: with the owner as its holder, if it holds it, or else with the first rank that does."""
    holders = {region: rank for rank, region in reversed(list(regions.items()))}
    if owner in regions:
        holders[regions[owner]] = owner
    return {rank: region for region, rank in holders.items()}


def _view(image: memoryview | None, position: int, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> Any:
    if image is None or not size:
        return None
    return torch.frombuffer(image, dtype=dtype, count=size, offset=position).view(shape)


def _to_bytes(piece: TensorBytes) -> Tensor:
    return _flatten(piece.tensor.detach().resolve_conj().resolve_neg().contiguous())


def _flatten(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _unpack(message: list[Move], landing: Tensor) -> None:
    for move, piece in zip(message, torch.split(landing, [each.size_bytes for each in message]), strict=True):
        assert move.write is not None
        if piece.data_ptr() != move.write.data_ptr():
            # Cloned, because a piece between others may not be aligned for its dtype.
            move.write.copy_(piece.clone().view(move.write.dtype).view(move.write.shape))


def _attempt(work: Callable[[], T]) -> "T | _Failure":
    try:
        return work()
    except HoldfastError as error:
        return _Failure(error)
    except Exception as error:  # which may not be fit to be sent
        return _Failure(RunStopped(f"rank {distributed.get_rank()}: {type(error).__name__}: {error}"))


@dataclass(frozen=True)
class _Failure:
    error: HoldfastError


def _result(found: Any) -> Any:
    if isinstance(found, _Failure):
        raise found.error
    return found
