"""Virtual ranks: a step whose bits don't depend on the number of ranks that train it.

A step's batch is cut into V shares. Each share has its own random numbers, which follow from seed, step and share, and
begins with the same buffers. The shares' gradients are summed in the order of a fixed binary tree. Any number of ranks
up to V can train the shares. Each rank holds the whole model (`whole`) or a part of the model (`blocks`).
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn

from holdfast.data import Share, combine
from holdfast.errors import ConfigError, RecipeError
from holdfast.extensions.virtual_ranks.blocks import ShardSums
from holdfast.extensions.virtual_ranks.buckets import Turn
from holdfast.extensions.virtual_ranks.elementwise import check_elementwise
from holdfast.extensions.virtual_ranks.layout import check_layout, check_one_model, check_order
from holdfast.extensions.virtual_ranks.norm import clip_to, take_norm
from holdfast.extensions.virtual_ranks.share_step import take_shares
from holdfast.extensions.virtual_ranks.tree import sum_columns
from holdfast.extensions.virtual_ranks.whole import WholeSums
from holdfast.machine import determinism, heartbeats
from holdfast.state import capture_rng, digest_rng
from holdfast.state.checksum import checksum_together
from holdfast.state.layout import copy_into
from holdfast.training.cooperation import Cooperation, ReadNames
from holdfast.training.data_ranks import DataRanks
from holdfast.training.step_record import Unread

# The hint for a loop that doesn't train the shares of its batches.
BY_SHARES = "take batches by `for batch in step.shares():`, or set compute.virtual_ranks = 0"


class VirtualRanks(Cooperation):
    """Ranks that train the shares of virtual ranks; this object runs the shares of this rank.

    Args:
        shares: the number of virtual ranks, V.
        data: the data ranks, if several ranks train the same samples. The ranks of a data rank train the same shares.
        is_cut: whether the model is sharded over the data ranks.

    Attributes:
        turns: the shares that this rank trains in each step, in order.
        own: this rank's shares, without repeated shares.
        is_first_step: whether no step has ended in this process.
        is_last: whether the present micro-batch is this rank's last micro-batch of the step.
        numbers: the numbers that the step's shares have logged, by name: tensors of shape (V,), zero for other ranks'
            shares.
        facts: in a step that is recorded in detail, for each of this rank's shares, checksums of the generators,
            buffers, loss and gradient.
        sums: the sums of the gradients; in a step that is recorded in detail, `sums.facts` has their checksums.
        is_undoable: whether `undo` can undo everything that the step in progress has changed so far.
    """

    has_common_state = True
    sums_gradients = True

    def __init__(
        self, shares: int, accelerator: Accelerator, seed: int, data: DataRanks | None = None, *, is_cut: bool = False
    ) -> None:
        """
        Raises:
            ConfigError: there are more data ranks than shares.
            RecipeError: the data ranks aren't in the order of the ranks.
        """
        super().__init__(accelerator, shares, data)
        check_ranks(shares, self.data.count, self.number)
        check_order(self.data)
        self.is_cut = is_cut
        self._seed = seed
        dealt = (shares, self.data.number, self.data.count, self.data.make_group())
        self.sums: WholeSums | ShardSums = ShardSums(*dealt) if is_cut else WholeSums(*dealt)
        self.turns = self.sums.turns
        self.own = [turn.share for turn in self.turns if turn.counts]
        self.is_first_step, self.is_last = True, False
        self._logged: dict[str, list[Tensor]] = {}  # the numbers logged in the present share
        self.facts: list[dict[str, str]] = []
        self.is_undoable = False
        self._is_detailed = False

    @property
    def has_parts(self) -> bool:
        return True

    def check_optimizer(self, optimizer: Any) -> None:
        if self.is_cut:
            check_elementwise(optimizer, self.accelerator.device)

    def attach(self, models: Sequence[nn.Module]) -> None:
        if self.number > 1:
            check_one_model(self.gather([name for model in models for name, _ in model.named_parameters()]))
            check_layout(models, self.data, is_cut=self.is_cut, is_grouped=self.has_groups)
        self.sums.attach(models)

    def seed(self, seed: int, *, keeps_seeds: bool) -> None:
        determinism.reseed(seed)  # use the same seed in all ranks, because `share` seeds each share anew

    def list_shares(self, batch_size: int) -> list[Share]:
        return [Share(batch_size, turn.share, self.shares) for turn in self.turns]

    @contextlib.contextmanager
    def step(self, model: nn.Module, step: int, *, in_detail: bool = False) -> Iterator[None]:
        """Run a step: the ``with`` block trains each share inside `share`. Then the parameters get the mean gradient.

        Afterwards the buffers have the values that they had after the first share, as with DDP. The generators get a
        state that follows from the step's number.

        Args:
            model: the module with all buffers.
            in_detail: whether to record `facts`.
        """
        self.sums.begin(in_detail=in_detail)
        self.numbers = {}
        self._model, self._step = model, step
        self._before = [each.clone() for each in model.buffers()]
        self._versions = [(each, each._version) for each in model.parameters()]
        self.is_undoable = True
        self._after = self._before
        self._is_detailed, self.facts = in_detail, []
        yield
        self.sums.finish()
        self._put_buffers(self._after)
        self.share_buffers(model)
        self._reseed("end")
        self.is_first_step = False

    @contextlib.contextmanager
    def share(self, turn: Turn) -> Iterator[None]:
        """Run one share: the ``with`` block trains it, so that the parameters get its gradient, and calls `log`.

        The ``with`` block has to call `micro_batch` before each of the share's micro-batches.

        Raises:
            RecipeError: the share has logged numbers with different names than this rank's first share.
        """
        self._reseed(turn.share)
        if turn != self.turns[0]:
            self._put_buffers(self._before)
        buffers = self._describe_beginning() if self._is_detailed else {}
        self._logged = {}
        yield
        if turn.share == 0:
            self._after = [each.clone() for each in self._model.buffers()]
        if self._is_detailed and turn.counts:
            losses = self._logged.get("loss", [])
            self.facts.append(buffers | {"loss": _describe(losses), "gradient": self.sums.describe()})
        self.sums.add(turn)
        if turn.counts:
            self._note_numbers(turn)

    def _note_numbers(self, turn: Turn) -> None:
        """Store, for each number that a share has logged, the mean over its micro-batches."""
        if turn.share != self.own[0] and self._logged.keys() != self.numbers.keys():
            raise RecipeError(
                "the shares of a batch have logged numbers of different names, whose mean can't be computed: "
                f"{_join(self.numbers)}, and {_join(self._logged)}",
                hint="log the same numbers in all shares",
            )
        for name, logged in self._logged.items():
            if name not in self.numbers:
                self.numbers[name] = torch.zeros(self.shares, device=self.accelerator.device)
            self.numbers[name][turn.share] += torch.stack(logged).sum() / len(logged)

    def log(self, name: str, number: Tensor) -> None:
        self._logged.setdefault(name, []).append(number)

    def micro_batch(self, turn: Turn, *, is_last: bool) -> None:
        """Begin a micro-batch of a share; ``is_last`` says whether it is the share's last micro-batch."""
        self.is_last = is_last and turn == self.turns[-1]
        self.sums.begin_micro_batch(turn, is_last=is_last)

    @property
    def counts(self) -> list[bool]:
        return [turn.counts for turn in self.turns]

    def take(self, training: Any, names: list[str]) -> Iterator[Any]:
        return take_shares(training, self, names)

    def refuse_whole_batch(self) -> None:
        raise RecipeError(
            f"compute.virtual_ranks = {self.shares}: the loop took a whole batch, but virtual ranks train each batch "
            "in shares",
            hint=BY_SHARES,
        )

    def refuse_missing_shares(self, step: int) -> None:
        raise RecipeError(
            f"compute.virtual_ranks = {self.shares}: step {step} did not train all shares of its batch",
            hint=BY_SHARES,
        )

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        if self.is_last:
            heartbeats.mark(heartbeats.Place.SYNCING)  # the ranks exchange gradients during this backward pass
        with self.overlapped():
            yield

    def note_loss(self, loss: Tensor) -> None:
        self.log("loss", loss.reshape(()))

    def mean_loss(self) -> Tensor:
        heartbeats.mark(heartbeats.Place.SYNCING)
        return self.mean_of_shares([self.numbers["loss"]])[0]

    def begin_update(self) -> None:
        heartbeats.mark(heartbeats.Place.COMPUTING)
        self.is_undoable = False

    def overlapped(self) -> contextlib.AbstractContextManager[None]:
        """Exchange gradients as they are completed, while the ``with`` block runs a micro-batch's backward pass.

        Use this only if nothing changes the gradients after the backward pass.
        """
        return self.sums.overlapped() if self.is_last else contextlib.nullcontext()

    def undo(self) -> bool:
        """Restore the buffers from before the step in progress. Return whether this undoes the whole step.

        The step isn't undone in three cases: the optimizer may have stepped, the loss itself has changed a
        parameter, or the model has other state that a forward pass may change. Extras needn't be restored, because the
        first step of each process refuses a loss that changes an extra.
        """
        if not self.is_undoable or self.has_changed_parameters:
            return False
        known = (self._model.named_parameters, self._model.named_buffers)
        if self._model.state_dict().keys() - {name for names in known for name, _ in names(remove_duplicate=False)}:
            return False
        self._put_buffers(self._before)
        return True

    @property
    def has_changed_parameters(self) -> bool:
        """Return whether a parameter was written to since the step began."""
        return any(each._version != version for each, version in self._versions)

    def mean(self, numbers: Sequence[Tensor]) -> Tensor:
        columns = [each for each in numbers if each.dim()]
        means = iter(self.mean_of_shares(columns) if columns else ())
        return torch.stack([next(means) if each.dim() else each for each in numbers])

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        gradients = [each.grad for each in parameters if each.grad is not None]
        total = take_norm(gradients)
        if limit < math.inf:
            clip_to(gradients, limit, total)
        return total

    def name_samples(self, steps: Sequence[Unread], read_names: ReadNames) -> Iterable[list[str]]:
        if self.is_alone:  # other ranks are lost, so this rank reads the names of their samples from the data
            others = [share for share in range(self.shares) if share not in self.own]
            both = [others, self.own]
            return [_in_order(both, [read_names(each.step - 1, others), each.samples]) for each in steps]
        shares, names = zip(*self.gather((self.own, [each.samples for each in steps])), strict=True)
        return [_in_order(shares, ranks) for ranks in zip(*names, strict=True)]

    def describe_parts(self, step: Unread, drawn_from: str, components: dict[str, Any]) -> list[dict[str, Any]]:
        accum = len(step.samples) // len(self.own)
        # Ranks of one data rank each have the gradient of their own part of the model.
        part = {"model_part": self.data.meshes.index(self.data.peers)} if len(self.data.meshes) > 1 else {}
        own: list[dict[str, Any]] = []
        for place, (share, facts) in enumerate(zip(self.own, self.facts, strict=True)):
            samples = combine(step.samples[place * accum : (place + 1) * accum])
            own.append({"rank": self.own_number, "share": share, **part, "samples": samples, **facts})
        return [*own, {"rank": self.own_number, **self.sums.facts}]

    def mean_of_shares(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return the mean of each number over all shares, shape (n,). All ranks call it together.

        Args:
            numbers: n tensors of shape (V,), as in the attribute `numbers`.
        """
        columns = torch.stack([*numbers])
        if self.number > 1:
            if not self.data.is_first:
                columns.zero_()
            distributed.all_reduce(columns)  # this sum is exact, because for each share all ranks but one have a zero
        return sum_columns(columns) / self.shares

    def _describe_beginning(self) -> dict[str, str]:
        return {"generators": digest_rng(capture_rng()), "buffers": _describe([*self._model.buffers()])}

    def _reseed(self, name: int | str) -> None:
        determinism.reseed(determinism.derive_seed(self._seed, self._step, name))

    def _put_buffers(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            copy_into(buffer, value)


def check_ranks(shares: int, data_ranks: int, ranks: int) -> None:
    """Raise ConfigError if there are more data ranks than shares."""
    if data_ranks > shares:
        found = "" if ranks == data_ranks else f"{data_ranks} data ranks, and "
        kind = "ranks" if ranks == data_ranks else "data ranks"
        raise ConfigError(
            f"compute.ranks = {ranks}: {found}there are only {shares} virtual ranks",
            hint=f"use at most {shares} {kind}; 4 to 8 virtual ranks for each of the {kind} divide the work evenly",
        )


def _in_order(shares: Sequence[Sequence[int]], names: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the samples of a step's micro-batches, in the order of the shares.

    Args:
        shares: the shares of each rank.
        names: for each rank, a name for each micro-batch of its shares.
    """
    found: dict[int, Sequence[str]] = {}
    for own, all_names in zip(shares, names, strict=True):
        accum = len(all_names) // len(own)
        found |= {share: all_names[place * accum : (place + 1) * accum] for place, share in enumerate(own)}
    return [name for share in sorted(found) for name in found[share]]


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _describe(tensors: Sequence[Tensor]) -> str:
    """Return a checksum of some tensors, 16 hex characters."""
    return f"{checksum_together(tensors):016x}"
