"""The sum of a bucket of gradients over the shares of a batch, for ranks that each hold the whole model.

First each rank computes the nodes of the tree whose leaves are all shares of this rank. Then each rank computes the
remaining nodes, but only for its own slice of the bucket, and sends its result to all ranks. This is a reduce-scatter
and an all-gather, in the tree's order.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from holdfast.errors import RecipeError
from holdfast.extensions.virtual_ranks.tree import Node, TreeSum, list_parts
from holdfast.state import is_sharded, local_of
from holdfast.state.checksum import checksum, checksum_together, join_checksums
from holdfast.state.shards import cut_like

# Gradients are summed in pieces of about this size, as in DDP.
BUCKET_BYTES = 25 * 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """A share of the batch that a rank trains.

    Attributes:
        counts: whether the share's result is added to the sum; False for a repeated share. A rank repeats a share if
            other ranks have one more share to train, because all ranks have to take part in the exchanges of a sharded
            model.
    """

    share: int
    counts: bool = True


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype on one device, whose gradients are summed as one flat tensor."""

    parameters: tuple[nn.Parameter, ...]

    def flatten(self, multiple: int) -> Tensor:
        """Return the gradients as one flat tensor, padded to a multiple of ``multiple`` elements.

        A parameter without a gradient contributes zeros. Flags after the gradients say which parameters have a
        gradient.
        """
        first = self.parameters[0]
        has = torch.tensor([each.grad is not None for each in self.parameters], dtype=first.dtype, device=first.device)
        grads = [torch.zeros_like(local_of(each)) if each.grad is None else _own(each) for each in self.parameters]
        missing = -(sum(each.numel() for each in grads) + len(has)) % multiple
        return torch.cat([*(each.reshape(-1) for each in grads), has, has.new_zeros(missing)])

    def put_back(self, mean: Tensor) -> None:
        """Set each parameter's gradient to the parameter's piece of the mean, or to None if no share has a gradient.

        Args:
            mean: a flat tensor in the layout of `flatten`.
        """
        sizes = [local_of(each).numel() for each in self.parameters]
        *pieces, has = torch.split(mean, [*sizes, len(mean) - sum(sizes)])
        for parameter, piece, share in zip(self.parameters, pieces, has.tolist(), strict=False):
            parameter.grad = _as_gradient(piece, parameter) if share else None


def _own(parameter: Any) -> Tensor:
    """Return a parameter's gradient in this rank: the whole gradient, or with tensor parallelism a shard."""
    gradient: Any = parameter.grad
    # With tensor parallelism a rank may hold only one summand of this gradient. `redistribute` adds the summands.
    if is_sharded(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)


def _as_gradient(own: Tensor, parameter: Any) -> Tensor:
    own = own.view_as(local_of(parameter))
    return cut_like(own, parameter) if is_sharded(parameter) else own


def make_buckets(parameters: Sequence[nn.Parameter], most_bytes: int | None = None) -> list[Bucket]:
    """Return buckets for parameters, in the parameters' order.

    Args:
        most_bytes: the largest size of a bucket; by default `BUCKET_BYTES`. A larger parameter gets a separate
            bucket.
    """
    distinct, most = dict.fromkeys(parameters), BUCKET_BYTES if most_bytes is None else most_bytes
    groups = pack_alike(distinct, lambda each: (each.dtype, each.device), lambda each: each.nbytes, most)
    return [Bucket(tuple(group)) for group in groups]


def pack_alike(
    items: Iterable[T], kind_of: Callable[[T], Hashable], size_of: Callable[[T], int], most: int
) -> Iterator[list[T]]:
    """Yield groups of items. The items of a group have the same kind, and together at most the size ``most``.

    A larger item is a separate group. Items of the same kind stay in their order.
    """
    alike: dict[Hashable, list[T]] = {}
    for each in items:
        alike.setdefault(kind_of(each), []).append(each)
    for members in alike.values():
        group, size = list[T](), 0
        for each in members:
            if group and size + size_of(each) > most:
                yield group
                group, size = [], 0
            group.append(each)
            size += size_of(each)
        yield group


class BucketSum:
    """The sum of a bucket's gradients over the shares of one step.

    Args:
        shares: the number of shares, V.
        blocks: for each data rank, the shares that it trains.
        group: the process group of the data ranks; None for all ranks.

    Attributes:
        awaited: the ``id`` of each parameter whose gradient the last share's backward pass has not completed.
        tree: the sum over this rank's shares; empty after `pass_on`.
        fact: a checksum of this rank's slice of the sum over all shares; only in a step that is recorded in detail.
    """

    def __init__(
        self, bucket: Bucket, shares: int, blocks: Sequence[range], group: Any = None, *, in_detail: bool
    ) -> None:
        self.bucket, self._shares, self._blocks, self._group = bucket, shares, blocks, group
        self._is_detailed = in_detail
        self.awaited = {id(each) for each in bucket.parameters}
        self.tree, self.fact = TreeSum(shares), ""

    def add(self, share: int) -> None:
        """Add the gradients that the parameters hold after a share to the sum.

        Set the parameters' gradients to None.
        """
        for each in self.bucket.parameters:
            refuse_sparse(each.grad)
        self.tree.add(Node(0, share), self.bucket.flatten(len(self._blocks)))
        for each in self.bucket.parameters:
            each.grad = None

    def send(self) -> None:
        """Begin to send to each rank that rank's slice of the sums over this rank's shares."""
        rank, ranks = distributed.get_rank(self._group), len(self._blocks)
        self._nodes = [list_parts(self._shares, block) for block in self._blocks]
        own = [self.tree.parts[node].view(ranks, -1) for node in self._nodes[rank]]
        self._found = [
            [rows[rank] for rows in own] if peer == rank else [torch.empty_like(own[0][0]) for _ in nodes]
            for peer, nodes in enumerate(self._nodes)
        ]
        self._rows = own[0]
        self._works = _begin(
            [(rows[peer], peer) for peer in range(ranks) for rows in own],
            [(part, peer) for peer in range(ranks) for part in self._found[peer]],
            self._group,
        )

    def pass_on(self) -> None:
        """Add up the sums that all ranks have sent, and begin to send the mean to all ranks."""
        _wait(self._works)
        tree = TreeSum(self._shares)
        for nodes, found in zip(self._nodes, self._found, strict=True):
            for node, part in zip(nodes, found, strict=True):
                tree.add(node, part)
        self.tree.parts.clear()
        del self._found
        if self._is_detailed:
            self.fact = f"{checksum_together([tree.root()]):016x}"
        # The sums over this rank's shares were sent already, so the mean may overwrite them.
        own = self._rows[distributed.get_rank(self._group)]
        torch.div(tree.root(), self._shares, out=own)
        # Don't use gloo's all_gather, because it takes three times as long: 57 ms for 25 MB and two ranks.
        if distributed.get_backend(self._group) == "gloo":
            self._works = _begin(
                [(own, peer) for peer in range(len(self._rows))],
                [*zip(self._rows, range(len(self._rows)), strict=True)],
                self._group,
            )
        else:
            rows = self._rows.view(-1)
            self._works = [distributed.all_gather_into_tensor(rows, own, group=self._group, async_op=True)]

    def put_back(self) -> None:
        """Set the parameters' gradients to the mean over all shares."""
        if len(self._blocks) == 1:
            self.bucket.put_back(self.tree.root().div_(self._shares))
            return
        _wait(self._works)
        self.bucket.put_back(self._rows.view(-1))


def _begin(
    sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], group: Any
) -> list[distributed.Work]:
    """Begin to exchange tensors with the other ranks. This rank sends nothing to itself."""
    orders = [(distributed.isend, *each) for each in sent] + [(distributed.irecv, *each) for each in received]
    rank = distributed.get_rank(group)
    return distributed.batch_isend_irecv(
        [distributed.P2POp(verb, each, group=group, group_peer=peer) for verb, each, peer in orders if peer != rank]
    )


def _wait(works: Sequence[distributed.Work]) -> None:
    for work in works:
        work.wait()


def describe_gradient(gradients: Sequence[Tensor | None]) -> str:
    """Return a checksum of a model's gradients, 16 hex characters. It shows, too, which parameters have no gradient."""
    found = iter(checksum([local_of(each) for each in gradients if each is not None]))
    return join_checksums([None if each is None else next(found) for each in gradients])


def refuse_sparse(gradient: Tensor | None) -> None:
    """Raise RecipeError if a gradient is sparse."""
    if gradient is not None and gradient.layout != torch.strided:
        raise RecipeError(
            "virtual ranks can't sum a sparse gradient in a fixed order",
            hint="set nn.Embedding(..., sparse=False), or compute.virtual_ranks = 0",
        )
