"""The sums of whole gradients over the shares of a batch, for ranks that each hold the whole model.

A rank trains a contiguous block of the shares and adds their gradients as they come, so that it ends with the few sums
of the block's subtrees. Between ranks each one adds the rest of the tree for its part of every bucket, and all get the
result: a reduce-scatter and an all-gather, in an order that the tree fixes. In the engine's own loop buckets are on
their way while the backward pass of a rank's last share goes on.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from holdfast.errors import RecipeError
from holdfast.state.checksum import checksum, checksum_together, checksum_value
from holdfast.training.tree import Node, TreeSum, deal, list_parts

# Gradients are summed in pieces of about this size, as DDP does it.
BUCKET_BYTES = 25 * 2**20

# What to do if a gradient can't be exchanged while the backward pass goes on.
HINT = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"


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

    def flatten(self, multiple: int) -> Tensor:
        """Return the gradients as one tensor, zeros where there is none, whose size is a multiple of a number.

        The numbers after the gradients say which parameters have one.
        """
        first = self.parameters[0]
        has = torch.tensor([each.grad is not None for each in self.parameters], dtype=first.dtype, device=first.device)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters]
        missing = -(sum(each.numel() for each in grads) + len(has)) % multiple
        return torch.cat([*(each.reshape(-1) for each in grads), has, has.new_zeros(missing)])

    def put_back(self, mean: Tensor) -> None:
        """Set the gradients from what `flatten` returned; None where no share has one."""
        sizes = [each.numel() for each in self.parameters]
        *pieces, has = torch.split(mean, [*sizes, len(mean) - sum(sizes)])
        for parameter, piece, share in zip(self.parameters, pieces, has.tolist(), strict=False):
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


class BucketSum:
    """The sum of a bucket's gradients over the shares of one step.

    Args:
        shares: the number of shares, V.
        blocks: the shares of each rank.

    Attributes:
        awaited: the ``id`` of each parameter whose gradient the last share's backward pass has not completed.
        tree: the sum over the own shares; from `pass_on` on this rank's part of the sum over all.
    """

    def __init__(self, bucket: Bucket, shares: int, blocks: Sequence[range]) -> None:
        self.bucket, self._shares, self._blocks = bucket, shares, blocks
        self.awaited = {id(each) for each in bucket.parameters}
        self.tree = TreeSum(shares)

    def add(self, share: int) -> None:
        """Add the gradients that a share has left in the parameters, which have none afterwards."""
        for each in self.bucket.parameters:
            refuse_sparse(each.grad)
        self.tree.add(Node(0, share), self.bucket.flatten(len(self._blocks)))
        for each in self.bucket.parameters:
            each.grad = None

    def send(self) -> None:
        """Begin to send each rank its part of the sums over the own shares."""
        rank, ranks = distributed.get_rank(), len(self._blocks)
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
        )

    def pass_on(self) -> None:
        """Add what all ranks have sent, and begin to send the mean to all ranks."""
        _wait(self._works)
        self.tree = TreeSum(self._shares)
        for nodes, found in zip(self._nodes, self._found, strict=True):
            for node, part in zip(nodes, found, strict=True):
                self.tree.add(node, part)
        del self._found
        # The sums of the own shares have been sent: the mean takes their place.
        own = self._rows[distributed.get_rank()]
        torch.div(self.tree.root(), self._shares, out=own)
        if distributed.get_backend() == "gloo":  # whose own way takes three times as long: 57 ms for 25 MB on two ranks
            self._works = _begin(
                [(own, peer) for peer in range(len(self._rows))],
                [*zip(self._rows, range(len(self._rows)), strict=True)],
            )
        else:
            self._works = [distributed.all_gather_into_tensor(self._rows.view(-1), own, async_op=True)]

    def put_back(self) -> None:
        """Leave the mean over all shares in the parameters."""
        if len(self._blocks) == 1:
            self.bucket.put_back(self.tree.root().div_(self._shares))
            return
        _wait(self._works)
        self.bucket.put_back(self._rows.view(-1))


class WholeSums:
    """The sums of whole gradients over the shares of each step.

    All ranks exchange the same buckets in the same order. A rank begins with a bucket once it is complete, during the
    backward pass of its last share (`overlapped`), or in `finish`: for the other ranks there is no difference.

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
        self._parameters: list[nn.Parameter] = []
        self._has_order, self._comes_at_once = False, False
        self._completed: list[int] | None = None  # while the order of gradients is looked for
        self._hooked: dict[int, nn.Parameter] = {}
        self._is_overlapped = False

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Sum the gradients of some models."""
        self._models = models

    def begin(self, *, in_detail: bool) -> None:
        """Begin a step. ``in_detail`` says whether to note `facts`, and whether `describe` will be called."""
        parameters = [each for model in self._models for each in model.parameters() if each.requires_grad]
        if [*map(id, parameters)] != [*map(id, self._parameters)]:
            # A backward pass reaches the last layers first. The first one that is overlapped shows its own order.
            self._parameters, self._order = parameters, parameters[::-1]
            self._has_order, self._completed = False, None
        self._sums = [BucketSum(each, self._shares, self._blocks) for each in make_buckets(self._order, BUCKET_BYTES)]
        self._sum_of = {id(each): found for found in self._sums for each in found.bucket.parameters}
        self._sent = 0  # the number of buckets whose exchange has begun
        self._is_detailed, self.facts = in_detail, {}

    def begin_micro_batch(self, turn: Turn, *, is_last: bool) -> None:
        """Begin a micro-batch of a share. Its gradient adds to those of the micro-batches before."""

    @contextlib.contextmanager
    def overlapped(self) -> Iterator[None]:
        """Exchange gradients in the block: the backward pass of the last share's last micro-batch.

        Nothing else may change gradients between the block and `add`. All ranks have such a block in the same steps.
        """
        if self._ranks > 1:
            self._watch()
        try:
            yield
        finally:
            self._is_overlapped = False

    def _watch(self) -> None:
        each: Any
        for each in self._parameters:
            if id(each) not in self._hooked:
                self._hooked[id(each)] = each
                each.register_post_accumulate_grad_hook(self._note)
        if not self._has_order:
            self._completed = []
        self._is_overlapped = True

    def _note(self, parameter: Tensor) -> None:
        """Note that a gradient is complete, and begin to exchange the buckets that are complete."""
        if not self._is_overlapped or id(parameter) not in self._sum_of:
            return
        if self._completed is not None:
            self._completed.append(id(parameter))
        elif not self._is_detailed and self._comes_at_once:
            self._sum_of[id(parameter)].awaited.discard(id(parameter))
            while self._sent < len(self._sums) and not self._sums[self._sent].awaited:
                self._sums[self._sent].add(self.turns[-1].share)
                self._send_next()

    def describe(self) -> str:
        """Return a checksum of the gradient of the share that was trained last, before `add`."""
        for each in self._parameters:
            refuse_sparse(each.grad)
        return describe_gradient([each.grad for each in self._parameters])

    def add(self, turn: Turn) -> None:
        """Add the gradient that a share has left in the parameters.

        Raises:
            RecipeError: the share has added to a gradient whose exchange had begun.
        """
        late = {
            id(each) for sent in self._sums[: self._sent] for each in sent.bucket.parameters if each.grad is not None
        }
        if late:
            names = [name for model in self._models for name, each in model.named_parameters() if id(each) in late]
            raise RecipeError(f"the gradient of {names[0]} comes in several parts of a backward pass", hint=HINT)
        for each in self._sums[self._sent :]:
            each.add(turn.share)

    def finish(self) -> None:
        """Leave the mean over all shares in the parameters. All ranks call it together."""
        if self._is_detailed:
            parts = [part for each in self._sums for part in each.tree.parts.values()]
            self.facts["partial_sum"] = f"{checksum_together(parts):016x}"
        if self._ranks > 1:
            while self._sent < len(self._sums):
                self._send_next()
            self._sums[-1].pass_on()
            if self._is_detailed:
                self.facts["sum"] = "".join(f"{checksum_together([each.tree.root()]):016x}" for each in self._sums)
        for each in self._sums:
            each.put_back()
        if self._completed is not None:
            self._agree_on_order()

    def _send_next(self) -> None:
        """Begin to exchange the next bucket, and pass on what the one before has come to."""
        self._sums[self._sent].send()
        if self._sent:
            self._sums[self._sent - 1].pass_on()
        self._sent += 1

    def _agree_on_order(self) -> None:
        """Fill the next steps' buckets in the order in which the main rank's backward pass completes gradients."""
        assert self._completed is not None
        self._comes_at_once = len({*self._completed}) == len(self._completed)
        places = {id(each): place for place, each in enumerate(self._parameters)}
        completed = [places.pop(each) for each in dict.fromkeys(self._completed)]
        order = torch.tensor([*completed, *places.values()], device=self._parameters[0].device)
        distributed.broadcast(order, 0)
        self._order = [self._parameters[place] for place in order.tolist()]
        self._has_order, self._completed = True, None


def _begin(sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> list[distributed.Work]:
    """Begin to send tensors to other ranks and to receive tensors from other ranks; what is for this rank stays."""
    rank = distributed.get_rank()
    orders = [distributed.P2POp(distributed.isend, each, peer) for each, peer in sent if peer != rank]
    orders += [distributed.P2POp(distributed.irecv, each, peer) for each, peer in received if peer != rank]
    return distributed.batch_isend_irecv(orders)


def _wait(works: Sequence[distributed.Work]) -> None:
    for work in works:
        work.wait()


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
