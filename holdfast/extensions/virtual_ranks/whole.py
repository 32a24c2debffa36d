"""The sums of gradients over the shares of a batch, for ranks that each hold the whole model.

A rank trains a contiguous block of the shares. It adds each share's gradient to the tree at once, so that it only keeps
the few sums of the block's subtrees. The ranks then exchange these sums bucket by bucket (`buckets`). If Holdfast runs
the training loop, the exchange begins during the backward pass of a rank's last share.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from holdfast.errors import RecipeError
from holdfast.extensions.virtual_ranks.buckets import (
    Bucket,
    BucketSum,
    Turn,
    describe_gradient,
    make_buckets,
    refuse_sparse,
)
from holdfast.extensions.virtual_ranks.tree import split_leaves
from holdfast.state.checksum import checksum_together

# The hint for a model whose gradients can't be exchanged while the backward pass continues.
HINT = "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"


class WholeSums:
    """The sums of gradients over the shares of each step, in ranks that each hold the whole model.

    All ranks exchange the same buckets in the same order. A rank sends a bucket as soon as its gradients are complete:
    during the backward pass of the rank's last share (`overlapped`), or else in `finish`. The receiving ranks need not
    know which of the two it was.

    Args:
        shares: the number of shares, V.
        rank: this rank's data rank.
        ranks: the number of data ranks.
        group: the process group of the data ranks; None for all ranks.

    Attributes:
        turns: the shares that this rank trains, which are a contiguous block.
        facts: in a step that is recorded in detail, checksums of the sum over this rank's shares, and of this rank's
            slice of the sum over all shares.
    """

    def __init__(self, shares: int, rank: int, ranks: int, group: Any = None) -> None:
        self._shares, self._ranks, self._group = shares, ranks, group
        self._blocks = split_leaves(shares, ranks)
        self.turns = [Turn(each) for each in self._blocks[rank]]
        self.facts: dict[str, str] = {}
        self._models: Sequence[nn.Module] = ()
        self._parameters: list[nn.Parameter] = []
        self._plain: list[Bucket] = []
        # the buckets, in the order in which a backward pass completes their gradients
        self._ordered: list[Bucket] | None = None
        self._comes_at_once = False
        # the ids of parameters, in the order in which their gradients are completed; recorded until the buckets have
        # this order
        self._completed: list[int] | None = None
        self._hooked: dict[int, nn.Parameter] = {}
        self._is_overlapped = False

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Register the models whose gradients are summed."""
        self._models = models

    def begin(self, *, in_detail: bool) -> None:
        """Begin a step. ``in_detail`` says whether to record `facts`, and whether `describe` will be called."""
        parameters = [each for model in self._models for each in model.parameters() if each.requires_grad]
        if [*map(id, parameters)] != [*map(id, self._parameters)]:
            self._parameters, self._plain = parameters, make_buckets(parameters[::-1])
            self._ordered, self._completed = None, None
        # Checksums in `facts` depend on the buckets. So a step that is recorded in detail always uses the buckets of a
        # process's first step.
        buckets = self._plain if in_detail or self._ordered is None else self._ordered
        self._sums = [BucketSum(each, self._shares, self._blocks, self._group, in_detail=in_detail) for each in buckets]
        self._sum_of = {id(each): found for found in self._sums for each in found.bucket.parameters}
        self._sent = 0  # the number of buckets whose exchange has begun
        self._is_detailed, self.facts = in_detail, {}

    def begin_micro_batch(self, turn: Turn, *, is_last: bool) -> None:
        """Do nothing: autograd sums the gradients of a share's micro-batches. `ShardSums` needs this call."""

    @contextlib.contextmanager
    def overlapped(self) -> Iterator[None]:
        """Exchange gradients as they are completed, while the ``with`` block runs the last share's last backward pass.

        Nothing may change gradients between this block and `add`. All ranks have to call this in the same steps.
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
        if self._ordered is None:
            self._completed = []
        self._is_overlapped = True

    def _note(self, parameter: Tensor) -> None:
        """Record that a gradient is complete. Begin to exchange the buckets whose gradients are all complete."""
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
        """Return a checksum of the gradient of the share that was trained last. Call it before `add`."""
        for each in self._parameters:
            refuse_sparse(each.grad)
        return describe_gradient([each.grad for each in self._parameters])

    def add(self, turn: Turn) -> None:
        """Add a share's gradient, which the parameters hold, to the sums.

        Raises:
            RecipeError: the share has changed a gradient after its exchange had begun.
        """
        late = {
            id(each) for sent in self._sums[: self._sent] for each in sent.bucket.parameters if each.grad is not None
        }
        if late:
            names = [name for model in self._models for name, each in model.named_parameters() if id(each) in late]
            raise RecipeError(f"the backward pass computes the gradient of {names[0]} in several parts", hint=HINT)
        for each in self._sums[self._sent :]:
            each.add(turn.share)

    def finish(self) -> None:
        """End a step: set the parameters' gradients to the mean over all shares. All ranks call it together."""
        if self._is_detailed:
            parts = [part for each in self._sums for part in each.tree.parts.values()]
            self.facts["partial_sum"] = f"{checksum_together(parts):016x}"
        if self._ranks > 1:
            while self._sent < len(self._sums):
                self._send_next()
            self._sums[-1].pass_on()
            if self._is_detailed:
                self.facts["sum"] = "".join(each.fact for each in self._sums)
        for each in self._sums:
            each.put_back()
        if self._completed is not None:
            self._agree_on_order()

    def _send_next(self) -> None:
        """Begin to exchange the next bucket, and to send the mean of the bucket before it."""
        self._sums[self._sent].send()
        if self._sent:
            self._sums[self._sent - 1].pass_on()
        self._sent += 1

    def _agree_on_order(self) -> None:
        """Build buckets for the next steps, in the order in which the main rank's backward pass completes gradients."""
        assert self._completed is not None
        self._comes_at_once = len({*self._completed}) == len(self._completed)
        places = {id(each): place for place, each in enumerate(self._parameters)}
        completed = [places.pop(each) for each in dict.fromkeys(self._completed)]
        order = torch.tensor([*completed, *places.values()], device=self._parameters[0].device)
        distributed.broadcast(order, 0)
        self._ordered = make_buckets([self._parameters[place] for place in order.tolist()])
        self._completed = None
