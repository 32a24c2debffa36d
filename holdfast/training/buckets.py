"""The sums of whole gradients over the shares of a batch, for ranks that each hold the whole model.

A rank trains a contiguous block of the shares and adds their gradients as they come, so that it ends with the few sums
of the block's subtrees. Between ranks each one adds the rest of the tree for its part of every bucket, and all get the
result: a reduce-scatter and an all-gather, in an order that the tree fixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from holdfast.errors import RecipeError
from holdfast.state.checksum import checksum, checksum_together, checksum_value
from holdfast.training.tree import Node, TreeSum, deal, list_parts

# Gradients are summed in pieces of about this size, as DDP does it.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Turn:
    """A share of the batch that a rank trains.

    Attributes:
        counts: False if the rank only trains it once more, because the other ranks have a share more than this one and
            can't train it alone; nothing of it is added.
    """

    share: int
    counts: bool = True


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype on one device, whose gradients are summed as one flat tensor."""

    parameters: tuple[nn.Parameter, ...]

    def flatten(self) -> Tensor:
        """Return the gradients as one tensor, zeros where there is none; the last numbers say which there are."""
        first = self.parameters[0]
        has = torch.tensor([each.grad is not None for each in self.parameters], dtype=first.dtype, device=first.device)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters]
        return torch.cat([*(each.reshape(-1) for each in grads), has])

    def put_back(self, mean: Tensor) -> None:
        """Set the gradients from what `flatten` returned; None where no share has one."""
        pieces = torch.split(mean, [*(each.numel() for each in self.parameters), len(self.parameters)])
        for parameter, piece, share in zip(self.parameters, pieces[:-1], pieces[-1].tolist(), strict=True):
            parameter.grad = piece.view_as(parameter) if share else None


def make_buckets(parameters: Sequence[nn.Parameter], most_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Return the buckets of some parameters, in their order."""
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for each in dict.fromkeys(parameters):
        alike.setdefault((each.dtype, each.device), []).append(each)
    buckets = []
    for members in alike.values():
        current: list[nn.Parameter] = []
        for each in members:
            if current and sum(other.nbytes for other in current) + each.nbytes > most_bytes:
                buckets.append(Bucket(tuple(current)))
                current = []
            current.append(each)
        buckets.append(Bucket(tuple(current)))
    return buckets


class WholeSums:
    """The sums of whole gradients over the shares of each step.

    Args:
        shares: the number of shares, V.

    Attributes:
        turns: the shares that this rank trains: a contiguous block.
        facts: of a step in detail, checksums of the sum over the own shares, and of this rank's part of the whole sum.
    """

    def __init__(self, shares: int, rank: int, ranks: int) -> None:
        self._shares, self._ranks = shares, ranks
        self._blocks = deal(shares, ranks)
        self.turns = [Turn(each) for each in self._blocks[rank]]
        self.facts: dict[str, str] = {}
        self._models: Sequence[nn.Module] = ()
        self._buckets: list[Bucket] = []
        self._trees: list[TreeSum] = []

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Sum the gradients of some models."""
        self._models = models

    def begin(self, *, in_detail: bool) -> None:
        """Begin a step. ``in_detail`` says whether to note `facts`, and whether `describe` will be called."""
        self._parameters = [each for model in self._models for each in model.parameters() if each.requires_grad]
        self._buckets = make_buckets(self._parameters)
        self._trees = [TreeSum(self._shares) for _ in self._buckets]
        self._is_detailed, self.facts = in_detail, {}

    def begin_micro_batch(self, turn: Turn, *, is_last: bool) -> None:
        """Begin a micro-batch of a share. Its gradient adds to those of the micro-batches before."""

    def describe(self) -> str:
        """Return a checksum of the gradient of the share that was trained last, before `add`."""
        for each in self._parameters:
            refuse_sparse(each.grad)
        return describe_gradient([each.grad for each in self._parameters])

    def add(self, turn: Turn) -> None:
        """Add the gradient that a share has left in the parameters."""
        for bucket, tree in zip(self._buckets, self._trees, strict=True):
            for each in bucket.parameters:
                refuse_sparse(each.grad)
            tree.add(Node(0, turn.share), bucket.flatten())
            for each in bucket.parameters:
                each.grad = None

    def finish(self) -> None:
        """Leave the mean over all shares in the parameters. All ranks call it together."""
        if self._is_detailed:
            parts = [part for tree in self._trees for part in tree.parts.values()]
            self.facts["partial_sum"] = f"{checksum_together(parts):016x}"
        for bucket, tree in zip(self._buckets, self._trees, strict=True):
            bucket.put_back(self._mean(tree))

    def _mean(self, tree: TreeSum) -> Tensor:
        """Return the mean over all shares, from the sums of all ranks; shape (n,)."""
        if self._ranks == 1:
            return tree.root().div_(self._shares)
        parts = list(tree.parts.values())
        size = len(parts[0])
        chunk = -(-size // self._ranks)
        missing = chunk * self._ranks - size
        padded = [nn.functional.pad(each, (0, missing)) if missing else each for each in parts]
        own = torch.stack(padded) if len(padded) > 1 else padded[0][None]
        nodes = [list_parts(self._shares, block) for block in self._blocks]
        lengths = [len(each) * chunk for each in nodes]
        sent = own.view(len(parts), self._ranks, chunk).transpose(0, 1).contiguous().view(-1)
        received = sent.new_empty(sum(lengths))
        distributed.all_to_all_single(received, sent, lengths, [len(parts) * chunk] * self._ranks)
        mine = TreeSum(self._shares)
        pieces = iter(received.view(-1, chunk).unbind())
        for node in (each for block in nodes for each in block):
            mine.add(node, next(pieces))
        if self._is_detailed:
            self.facts["sum"] = self.facts.get("sum", "") + f"{checksum_together([mine.root()]):016x}"
        return _gather(mine.root().div_(self._shares))[:size]


def _gather(own: Tensor) -> Tensor:
    """Return the tensors of all ranks as one; each shape (n,)."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    whole = own.new_empty(ranks * len(own))
    if distributed.get_backend() != "gloo":
        distributed.all_gather_into_tensor(whole, own.contiguous())
        return whole
    # Gloo's own takes three times as long: 57 ms for 25 MB on two ranks.
    pieces = whole.view(ranks, -1)
    pieces[rank] = own
    others = [number for number in range(ranks) if number != rank]
    orders = [distributed.P2POp(distributed.isend, pieces[rank], number) for number in others]
    orders += [distributed.P2POp(distributed.irecv, pieces[number], number) for number in others]
    for work in distributed.batch_isend_irecv(orders):
        work.wait()
    return whole


def describe_gradient(gradients: Sequence[Tensor | None]) -> str:
    """Return a checksum of a model's gradients, 16 hex characters. None is no gradient."""
    found = iter(checksum([each for each in gradients if each is not None]))
    return join_checksums([None if each is None else next(found) for each in gradients])


def join_checksums(checksums: Sequence[int | None]) -> str:
    """Return one checksum, 16 hex characters, for those of a model's gradients in the order of its parameters."""
    return f"{checksum_value(repr(list(checksums)).encode()):016x}"


def refuse_sparse(gradient: Tensor | None) -> None:
    """Raise RecipeError if a gradient is sparse."""
    if gradient is not None and gradient.layout != torch.strided:
        raise RecipeError(
            "virtual ranks can't sum a sparse gradient in a fixed order",
            hint="nn.Embedding(..., sparse=False), or compute.virtual_ranks = 0",
        )
