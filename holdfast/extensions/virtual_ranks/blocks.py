"""The sums of gradients over the shares of a batch, for ranks that each hold a part of the model (FSDP2).

The shares are trained in rounds: in round k, rank r of R trains share k * R + r. As soon as a round's backward pass has
computed a block's gradient, the gradient is exchanged: each rank gets its own rows of all ranks' gradients, and adds
these in the tree's order. A rank never keeps a whole gradient. Of its rows it keeps a few partial sums: as soon as both
children of a node in the tree are complete, their sum takes their place. The tree, and so each bit, is the same as for
ranks that hold the whole model.

With replicas (HSDP) several ranks hold the same rows, and each of them adds up a part of these rows. After its
reduce-scatter FSDP2 sums over the replicas. That sum assembles the parts, because each replica has -0.0 outside its own
part, and -0.0 changes no number. With tensor parallelism the ranks here are the data ranks that hold the same part of
each layer.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from holdfast.errors import RecipeError
from holdfast.extensions.virtual_ranks.buckets import Turn, refuse_sparse
from holdfast.extensions.virtual_ranks.tree import Node, TreeSum
from holdfast.state import local_of
from holdfast.state.checksum import checksum, checksum_together, join_checksums
from holdfast.training.data_ranks import find_grid
from holdfast.training.fsdp_modules import list_fsdp_modules

# The hint for a model that uses its blocks in a way that these sums don't support.
HINT = 'use the same modules in every forward pass, or set compute.parallel = "ddp"'


class BlockSum:
    """The sum of one block's gradient over the shares. FSDP2 calls this object instead of its own reduce-scatter.

    Args:
        name: the block's name in the model.
        block: a module that `fully_shard` has sharded.
        parameters: the names of the parameters that FSDP2 gathers and reduces together with this block.
        rank: this rank's data rank.
        group: the process group of the data ranks; None for all ranks.

    Attributes:
        parameters: the block's sharded parameters, with this rank's rows.
        used: for each parameter, whether any of this rank's shares has computed its gradient in this step.
        checksums: for each parameter, a checksum of the last share's gradient; only in a step that is recorded in
            detail.
        fact: a checksum of this rank's rows of the sum over all shares; only in a step that is recorded in detail.
    """

    def __init__(
        self, name: str, block: Any, parameters: Sequence[str], shares: int, rank: int, group: Any = None
    ) -> None:
        self._name, self._block, self._names = name, block, parameters
        self._shares, self._rank, self._group = shares, rank, group
        self._replicas, self._parts = find_grid(block.get_parameter(parameters[0])).shape
        self._allocated: list[Tensor] = []
        self._hooked: dict[int, nn.Parameter] = {}
        self._round: range | None = None
        self.parameters: list[nn.Parameter] = []
        block.set_custom_reduce_scatter(self)
        # This object writes means over shares. Without the next two calls FSDP2 would expect a sum for float64 and
        # float16, and divide the mean by the number of ranks.
        block.set_force_sum_reduction_for_comms(True)
        block.set_gradient_divide_factor(1.0)
        if self._parts == 1:  # a single shard needs no reduce-scatter, so FSDP2 would not call this object
            block.set_all_reduce_hook(self._replace)
        block.register_forward_pre_hook(self._watch)

    @property
    def grid(self) -> str:
        """Return the numbers of replicas and of shards, such as 2x4. This rank's rows depend on both."""
        return f"{self._replicas}x{self._parts}"

    def begin(self, *, in_detail: bool) -> None:
        """Begin a step. ``in_detail`` says whether to record `checksums`."""
        self.parameters = [self._block.get_parameter(name) for name in self._names]
        self.used = [False] * len(self._names)
        self.tree, self._is_detailed, self.fact = TreeSum(self._shares), in_detail, ""
        self.end_share()

    def begin_micro_batch(self, round_: range, *, is_last: bool) -> None:
        """Begin a micro-batch of a round.

        With ``is_last``, the round's gradients are exchanged after this micro-batch.
        """
        self._round, self._is_last, self._calls, self._is_done = round_, is_last, 0, False
        self._block.set_requires_gradient_sync(False, recurse=False)
        if self._parts > 1:
            # Each replica has summed different rows of this shard. FSDP2's all-reduce over the replicas joins the rows,
            # so it may run only after the last round.
            self._block.set_requires_all_reduce(round_.stop == self._shares, recurse=False)

    def end_share(self) -> None:
        """End a share: reset the checksums of its gradients."""
        self.checksums: list[int | None] = [None] * len(self._names)

    def finish(self) -> None:
        """End a step. Afterwards no backward pass may change the gradients.

        Raises:
            RecipeError: only some of the shares have used the block.
        """
        self._round = None
        self._block.set_requires_gradient_sync(True, recurse=False)
        self._block.set_requires_all_reduce(True, recurse=False)
        if self.tree.parts:
            raise RecipeError(f"the forward pass used {self._name} in only some shares of the batch", hint=HINT)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the collective. FSDP2 calls this first for the input, and then for the output."""
        made = torch.empty(*size, dtype=dtype, device=device)
        if self._parts == 1:
            self._allocated = [*self._allocated[-1:], made]
        return made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Add the gradients of a round; after the last round write the mean over all shares to the output.

        Args:
            output_tensor: this rank's rows of the block's gradients.
            input_tensor: the block's gradients in this rank, first the rows of the first rank, and so on.
        """
        self._reduce(output_tensor, input_tensor)

    def _replace(self, output: Tensor) -> None:
        """Sum a gradient that each rank holds whole. FSDP2 calls this hook after its own sum over the replicas.

        Args:
            output: the result of FSDP2's own sum, which is overwritten.
        """
        own, self._allocated = self._allocated[0], []
        if own.is_cuda:
            # FSDP2 keeps this memory only until it is copied into the output
            own.record_stream(torch.cuda.current_stream())
        self._reduce(output, own)
        if self._replicas > 1 and (self._round is None or self._round.stop == self._shares):
            distributed.all_reduce(output, group=self._group)

    def _reduce(self, output: Tensor, own: Tensor) -> None:
        """Add the gradients of a round; after the last round write the mean over all shares to the output.

        Args:
            output: this rank's rows of the block's gradients. With replicas only this rank's part of them is written,
                and the rest is -0.0.
            own: the block's gradients in this rank: first the rows of the first shard, and so on.
        """
        pieces = self._cut(own)
        # Outside of a step a probe (see `Recipe`) computes a gradient, of the same micro-batch in all ranks. So nothing
        # has to be summed.
        if self._round is None:
            self._open(output, pieces[self._rank])
            return
        if self._is_done:
            raise RecipeError(f"the backward pass computes the gradient of {self._name} in several parts", hint=HINT)
        self._is_done = True
        for parameter in self.parameters:
            parameter.grad = None  # otherwise FSDP2 would add the new gradient to the last round's gradient
        received = pieces
        if len(pieces) > 1:
            received = torch.empty_like(pieces)
            distributed.all_to_all_single(received.view(-1), pieces.view(-1), group=self._group)
        for share, rows in zip(self._round, received, strict=False):  # a last round may have fewer shares than ranks
            self.tree.add(Node(0, share), rows)
        if self._round.stop < self._shares:
            self._open(output)
            # The remaining sums may be views of the memory into which all ranks' rows were received. Copy them, to free
            # that memory.
            place = received.untyped_storage().data_ptr()
            for node, part in self.tree.parts.items() if len(received) > 1 else ():
                if part.untyped_storage().data_ptr() == place:
                    self.tree.parts[node] = part.clone()
        elif self.tree.is_complete:
            total = self.tree.root()
            if self._is_detailed:
                self.fact = f"{checksum_together([total]):016x}"
            self._open(output, total.div_(self._shares))
            self.tree.parts.clear()

    def _cut(self, own: Tensor) -> Tensor:
        """Return a gradient cut into the piece that each data rank adds up; shape (ranks, n)."""
        rows = own.view(self._parts, -1)
        if self._replicas == 1:
            return rows
        rows = functional.pad(rows, (0, -rows.shape[1] % self._replicas))
        pieces = rows.view(self._parts, self._replicas, -1).transpose(0, 1)
        return pieces.reshape(self._replicas * self._parts, -1)

    def _open(self, output: Tensor, piece: Tensor | None = None) -> None:
        """Write this rank's piece, if given, to its place in the output.

        Fill the rest with -0.0, which changes no sum.
        """
        if self._replicas == 1 and piece is not None:
            output.copy_(piece)
            return
        output.fill_(-0.0)
        if piece is not None:
            place = output[self._rank // self._parts * len(piece) :][: len(piece)]
            place.copy_(piece[: len(place)])

    def _watch(self, *_: object) -> None:
        """Watch which of the block's parameters get a gradient.

        This hook runs before a forward pass, after FSDP2 has gathered the parameters.
        """
        if self._round is None:
            return
        self._calls += 1
        # If a block is called several times, FSDP2 would exchange the gradient after the backward pass of each call.
        # But the gradient is complete only after the last of these passes. Then `note` turns the exchange on.
        self._block.set_requires_gradient_sync(self._is_last and self._calls == 1, recurse=False)
        for place, name in enumerate(self._names):
            whole = self._block.get_parameter(name)
            if whole.requires_grad and id(whole) not in self._hooked:
                self._hooked[id(whole)] = whole
                whole.register_post_accumulate_grad_hook(self._make_note(place))

    def _make_note(self, place: int) -> Callable[[Tensor], None]:
        def note(whole: Tensor) -> None:
            if self._round is None or whole.grad is None:
                return
            refuse_sparse(whole.grad)
            self._block.set_requires_gradient_sync(self._is_last, recurse=False)
            self.used[place] = True
            if self._is_detailed:
                (self.checksums[place],) = checksum([local_of(whole.grad)])

        return note


class ShardSums:
    """The sums of gradients over the shares of each step, in a model that `fully_shard` has sharded.

    Args:
        shares: the number of shares of a batch.
        rank: this rank's data rank.
        ranks: the number of data ranks.
        group: the process group of the data ranks; None for all ranks.

    Attributes:
        turns: the shares that this rank trains, one share in each round.
        facts: if the step is recorded in detail, a checksum of this rank's rows of the sum over all shares, and the
            blocks' grid.
    """

    def __init__(self, shares: int, rank: int, ranks: int, group: Any = None) -> None:
        self._shares, self._rank, self._ranks, self._group = shares, rank, ranks, group
        self._rounds = [range(first, min(first + ranks, shares)) for first in range(0, shares, ranks)]
        self.turns = [
            Turn(each.start + rank) if rank < len(each) else Turn(each.start + rank - ranks, counts=False)
            for each in self._rounds
        ]
        self.facts: dict[str, str] = {}
        self._models: Sequence[Any] = ()
        self._blocks: list[BlockSum] = []

    def attach(self, models: Sequence[Any]) -> None:
        """Register the sharded models whose gradients are summed.

        Outside of a step, gradients aren't summed over ranks.
        """
        self._models = models
        dealt = (self._shares, self._rank, self._group)
        self._blocks = [block for model in models for block in _make_sums(model, *dealt)]

    def begin(self, *, in_detail: bool) -> None:
        """Begin a step. ``in_detail`` says whether to record `facts`, and whether `describe` will be called."""
        self._is_detailed, self.facts = in_detail, {}
        for model in self._models:  # a parameter may have a gradient in only some of the ranks
            model.set_reduce_scatter_unused_params(True)
        for block in self._blocks:
            block.begin(in_detail=in_detail)
        self._turn = 0

    def begin_micro_batch(self, turn: Turn, *, is_last: bool) -> None:
        """Begin a micro-batch of a share. The gradients of a share's micro-batches are summed and then exchanged."""
        for block in self._blocks:
            block.begin_micro_batch(self._rounds[self._turn], is_last=is_last)

    def overlapped(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward pass. It does nothing, because FSDP2 exchanges gradients in any pass."""
        return contextlib.nullcontext()

    def describe(self) -> str:
        """Return a checksum of the gradient of the share that was trained last."""
        found = {
            id(parameter): value
            for block in self._blocks
            for parameter, value in zip(block.parameters, block.checksums, strict=True)
        }
        parameters = (each for model in self._models for each in model.parameters() if each.requires_grad)
        return join_checksums([found[id(each)] for each in parameters])

    def add(self, turn: Turn) -> None:
        """End a share. Its gradient was already added during the backward pass."""
        self._turn += 1
        for block in self._blocks:
            block.end_share()

    def finish(self) -> None:
        """End a step: set the parameters' gradients to the mean over all shares. All ranks call it together."""
        for model in self._models:
            model.set_reduce_scatter_unused_params(False)
        for block in self._blocks:
            block.finish()
        if self._is_detailed:
            self.facts["sum"] = "".join(block.fact for block in self._blocks)
            self.facts["grid"] = ",".join(sorted({block.grid for block in self._blocks}))
        places = [(block, place) for block in self._blocks for place in range(len(block.used))]
        device = self._blocks[0].parameters[0].device
        used = torch.tensor([block.used[place] for block, place in places], dtype=torch.int32, device=device)
        distributed.all_reduce(used, distributed.ReduceOp.MAX)
        for (block, place), is_used in zip(places, used.tolist(), strict=True):
            if not is_used:
                block.parameters[place].grad = None


def _make_sums(model: nn.Module, shares: int, rank: int, group: Any) -> list[BlockSum]:
    found, seen = [], set[int]()
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    # inner blocks first, because an outer block doesn't own the parameters of its inner blocks
    for block in reversed(list_fsdp_modules(model)):
        own = {name: each for name, each in block.named_parameters() if id(each) not in seen}
        seen |= {id(each) for each in own.values()}
        if own:
            found.append(BlockSum(names[id(block)], block, list(own), shares, rank, group))
    return found
