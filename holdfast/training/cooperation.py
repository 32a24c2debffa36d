"""How the ranks of a training cooperate: how they divide the work, what they exchange, and which state they share.

With `SeparateRanks` each rank trains one part of each batch, has its own random numbers, extras and position in the
data, and the gradients are averaged. A different cooperation may cut a batch in other ways.
"""

import abc
import contextlib
import hashlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from holdfast.data import Share, combine
from holdfast.errors import RecipeError
from holdfast.machine import determinism, heartbeats
from holdfast.machine.heartbeats import Place
from holdfast.state import capture_rng, digest_rng, is_sharded
from holdfast.state.checksum import count_by_place
from holdfast.state.layout import share_tensor
from holdfast.training import objects
from holdfast.training.data_ranks import DataRanks, check_model, separate
from holdfast.training.gradient_norm import take_local_norm
from holdfast.training.own_gradients import OwnGradients
from holdfast.training.step_record import Unread
from holdfast.training.tensor_names import list_saved_names

if TYPE_CHECKING:
    from holdfast.training.sharded.exchange import Exchange
    from holdfast.training.sharded.stages import Stages

# The package with the code of shards and stages, which most runs don't import.
SHARDED = "holdfast.training.sharded"

# A function of a step's number and of shares' numbers: it loads the micro-batches of these shares of the step's batch
# again, and returns the micro-batches' names.
ReadNames = Callable[[int, Iterable[int]], list[str]]


class Cooperation(abc.ABC):
    """This rank's view of all ranks of a training.

    Attributes:
        has_common_state: whether all ranks have the same generators, extras and position in the data; a checkpoint then
            contains them once.
        sums_gradients: whether the ranks sum the gradients themselves, in place of DDP. A user's own loop then takes
            its batches from `take`.
        is_alone: whether this rank continues without the others, because one of them is lost; see `lone_save`.
        shares: the number of parts into which each batch is cut.
        data: the data-parallel rank of each rank. Ranks with the same data rank train the same samples.
        stages: the stages of a pipeline that the ranks hold; None if the model's tensors have the same names in all
            ranks, so that there is no pipeline.
        numbers: the numbers that `log` has logged in the step, by name; see `mean`.
    """

    has_common_state: bool
    sums_gradients: bool

    def __init__(self, accelerator: Accelerator, shares: int, data: DataRanks | None = None) -> None:
        self.accelerator, self.shares = accelerator, shares
        self.data = data or separate(accelerator)
        # With DDP, compute checksums as earlier versions did: earlier checkpoints contain such checksums.
        count_by_place(self.sums_gradients)
        self.is_alone = False
        self.stages: Stages | None = None
        self.numbers: dict[str, Tensor] = {}
        self._exchange: Exchange | None = None

    @property
    def number(self) -> int:
        """Return the number of ranks that train together."""
        return int(self.accelerator.num_processes)

    @property
    def own_number(self) -> int:
        """Return this rank's number, from 0."""
        return int(self.accelerator.process_index)

    def find_stages(self, model: nn.Module, *, is_told: bool) -> None:
        """Find out whether the ranks hold the stages of a pipeline, and set `stages`. All ranks call it together.

        Args:
            is_told: whether the program itself has set its data ranks: which ranks train the same samples.

        Raises:
            RecipeError: the ranks' stages can't be trained and saved together; all ranks raise it.
        """
        names = hashlib.sha256(repr(sorted(list_saved_names(model))).encode()).hexdigest()
        if len({*self.gather(names)}) > 1:
            self.stages = pkgutil.resolve_name(f"{SHARDED}.stages:make_stages")(model, self, is_told=is_told)

    @property
    def has_others(self) -> bool:
        """Return whether other ranks train together with this rank."""
        return self.number > 1 and not self.is_alone

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes for all ranks: whether it is the main rank, or the only rank left."""
        return self.is_alone or bool(self.accelerator.is_main_process)

    @property
    def exchange(self) -> "Exchange":
        """Return the `Exchange` by which the ranks save and restore a sharded state. All ranks ask for it together."""
        if self._exchange is None:
            self._exchange = pkgutil.resolve_name(f"{SHARDED}.exchange:Exchange")(self.accelerator.device)
        return self._exchange

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all ranks pass to this call, by rank."""
        return objects.gather(value) if self.has_others else [value]

    def gather_in_main(self, value: Any) -> list[Any]:
        """Return the result of `gather` in the main rank; elsewhere this rank's value, and None for all others.

        Use it for states, which may be large.
        """
        return objects.gather_in_main(value) if self.has_others else [value]

    @property
    def has_groups(self) -> bool:
        """Return whether several ranks train the same samples."""
        return self.has_others and self.data.count < self.number

    def gather_samples(self, name: str) -> list[str]:
        """Return the names of the samples that the data ranks train, by data rank. All ranks call it together.

        Args:
            name: the name of this rank's samples.

        Raises:
            RecipeError: ranks of one data rank train different samples.
        """
        found: dict[int, tuple[int, str]] = {}
        for rank, (number, each) in enumerate(self.gather((self.data.number, name))):
            first, before = found.setdefault(number, (rank, each))
            if each != before:
                raise RecipeError(
                    f"ranks {first} and {rank} are both data rank {number} of {self.data.count}, so they need the "
                    "same samples, but train different ones",
                    hint="divide the data by run.data_rank and run.data_ranks: "
                    "DistributedSampler(data, num_replicas=run.data_ranks, rank=run.data_rank)",
                )
        return [each for _, (_, each) in sorted(found.items())]

    def share_buffers(self, module: nn.Module) -> None:
        """Copy the main rank's buffers to all ranks, as DDP does before each step. A checkpoint contains these buffers.

        Ranks that hold different stages of a pipeline keep their own buffers. All ranks call it together.
        """
        for buffer in module.buffers() if self.has_others and self.stages is None else ():
            self._share(buffer)

    def share_saved_buffers(self, module: nn.Module) -> None:
        """Copy to all ranks those buffers of the main rank that a checkpoint contains; see `share_buffers`."""
        for each in module.modules() if self.has_others else ():
            for name, buffer in each._buffers.items():
                is_saved = name not in each._non_persistent_buffers_set
                if buffer is not None and is_saved and not is_sharded(buffer):
                    self._share(buffer)

    def _share(self, buffer: Tensor) -> None:
        # NCCL can't send a buffer on the CPU, such as a buffer of an `AveragedModel`.
        share_tensor(buffer, objects.find_group(buffer.device, self.accelerator.device))

    @property
    def states(self) -> int:
        """Return the number of ranks whose own states a checkpoint contains."""
        return 1 if self.has_common_state else self.number

    @property
    def own_state(self) -> int:
        """Return the index of this rank's state among the ranks' states in a checkpoint."""
        return 0 if self.has_common_state else self.own_number

    @property
    @abc.abstractmethod
    def has_parts(self) -> bool:
        """Return whether a trail can record facts of single ranks, or of single shares of a batch."""

    def watching(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """While the block trains a step, record the facts for `describe_parts` that exist only during a step."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def check_optimizer(self, optimizer: Any) -> None:
        """Raise ConfigError if this optimizer can't train a model that is cut into parts, one for each rank."""

    @abc.abstractmethod
    def attach(self, models: Sequence[nn.Module]) -> None:
        """Register the models that the ranks train together, before the first step and the first probe.

        Raises:
            RecipeError: the models' layout doesn't fit the samples that the ranks train.
        """

    @abc.abstractmethod
    def seed(self, seed: int, *, keeps_seeds: bool) -> None:
        """Seed this rank's random numbers, after all ranks have built the same model from the same seed.

        Args:
            keeps_seeds: whether to keep the ranks' present seeds if the program has given each rank a different seed.
        """

    @abc.abstractmethod
    def list_shares(self, batch_size: int) -> list[Share]:
        """Return a `Share` for each part of a batch that this rank trains, in the order of training."""

    @property
    def counts(self) -> list[bool]:
        """Return, for each part of a batch that this rank trains, whether the part isn't a mere repetition."""
        return [True]

    @abc.abstractmethod
    def take(self, training: Any, names: list[str]) -> Iterator[Any]:
        """Yield the micro-batches of a step that this rank trains. The caller calls ``backward`` on each loss.

        After the last micro-batch the parameters have the mean gradient. All ranks call it together.

        Args:
            training: the `Training`.
            names: a list to which this call adds the names of the micro-batches.
        """

    def log(self, name: str, number: Tensor) -> None:
        """Log a number of the present micro-batch: a float32 scalar. Only ranks that sum the gradients log numbers."""
        raise NotImplementedError

    def refuse_whole_batch(self) -> None:
        """Raise RecipeError if a user's own loop has to take its batches from `take`, and not one by one."""
        return

    def refuse_missing_shares(self, step: int) -> None:
        """Raise RecipeError if a user's own loop must take all batches of `take`, because it hasn't in this step."""
        return

    @abc.abstractmethod
    def exchanging(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a micro-batch's backward pass, in which the ranks may exchange gradients."""

    @abc.abstractmethod
    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of the present micro-batch: a float32 scalar."""

    @abc.abstractmethod
    def mean_loss(self) -> Tensor:
        """Return the mean of the losses noted in this step. All ranks call it together."""

    @abc.abstractmethod
    def begin_update(self) -> None:
        """Note that the optimizer steps now, so that `undo` can't undo the step any more."""

    def undo(self) -> bool:
        """Undo the step in progress in this rank alone. Return False if something of it may remain."""
        return False

    @abc.abstractmethod
    def mean(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return the mean of each logged number over ranks and shares.

        Args:
            numbers: this rank's value of each logged number: a scalar, or a tensor of shape (shares,) from `numbers`.
        """

    @abc.abstractmethod
    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale the gradient of some parameters down to a norm of at most ``limit``. Return the norm before scaling."""

    @abc.abstractmethod
    def name_samples(self, steps: Sequence[Unread], read_names: ReadNames) -> Iterable[list[str]]:
        """Return, for each step, the names of this rank's micro-batches, or of all shares."""

    @abc.abstractmethod
    def describe_parts(self, step: Unread, drawn_from: str, components: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the facts that a trail records of this rank in a step, or of each of its shares.

        `holdfast.checkpoint.departure` compares the facts of two trainings, so that a proof or an audit can name the
        rank in which the trainings differ first.

        Args:
            step: the step that was trained last.
            drawn_from: a digest of this rank's generators at the beginning of the step.
            components: the checksums of this rank's state; see `checksums.describe_components`. Empty if the step
                isn't recorded in detail.
        """


class SeparateRanks(Cooperation):
    """Ranks that each train one part of each batch, with their own random numbers, extras and position in the data."""

    has_common_state = False
    sums_gradients = False

    def __init__(self, accelerator: Accelerator, data: DataRanks | None = None) -> None:
        """
        Args:
            data: the data ranks, if some ranks train the same samples; by default each rank trains different samples.
        """
        super().__init__(accelerator, (data or separate(accelerator)).count, data)
        self._is_told = data is not None
        self._gradients = OwnGradients()
        self._losses, self._accum = torch.zeros(()), 1  # the sum of the step's losses, and their number

    @property
    def has_parts(self) -> bool:
        return self.number > 1

    def watching(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        # If several ranks train the same samples together, or a model is split into pipeline stages, one rank alone
        # can't compute its gradient again to check it. So record checksums of own gradients only if each rank trains
        # its samples alone.
        is_alone = self.data.count == self.number and self.stages is None
        return self._gradients.watching(model) if is_alone else contextlib.nullcontext()

    def check_optimizer(self, optimizer: Any) -> None:
        pass  # FSDP2 averages the gradients of each element over the ranks, for any optimizer

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Check that the models' layout fits the samples. DDP, FSDP2 or `Synchronized` averages the gradients."""
        for model in models if self.number > 1 else ():
            check_model(model, self.data, is_told=self._is_told)

    def seed(self, seed: int, *, keeps_seeds: bool) -> None:
        if keeps_seeds:
            states = self.gather(digest_rng(capture_rng()))
            if self.data.number == 0 or states[self.own_number] != states[0]:
                return
        determinism.reseed(seed + self.data.number)

    def list_shares(self, batch_size: int) -> list[Share]:
        return [Share(batch_size, self.data.number, self.data.count)]

    def take(self, training: Any, names: list[str]) -> Iterator[Any]:
        self._losses = torch.zeros((), device=self.accelerator.device)
        self._accum = training.recipe.grad_accum
        for _ in range(self._accum):
            name, batch = training.next_batch()
            names.append(name)
            with self.accelerator.accumulate(training.model):
                yield batch

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        if self.accelerator.sync_gradients:
            heartbeats.mark(Place.SYNCING)
        yield
        heartbeats.mark(Place.COMPUTING)

    def note_loss(self, loss: Tensor) -> None:
        self._losses += loss

    def mean_loss(self) -> Tensor:
        return self._losses / self._accum

    def begin_update(self) -> None:
        pass  # no step is undone

    def mean(self, numbers: Sequence[Tensor]) -> Tensor:
        found = torch.stack([*numbers])
        mean: Tensor = self.accelerator.reduce(found, "mean") if self.number > 1 else found
        return mean

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        if self.stages is not None or any(is_sharded(each.grad) for each in parameters):
            clip = pkgutil.resolve_name(f"{SHARDED}.clipping:clip_regions")
            return cast(Tensor, clip(self.accelerator, self.stages, parameters, limit))
        self.accelerator.unscale_gradients()
        # Don't call torch's clipping with an infinite limit: it would read the whole gradient again, and a single
        # infinite number would make the whole gradient NaN.
        return nn.utils.clip_grad_norm_(parameters, limit) if limit < math.inf else take_local_norm(parameters)

    def name_samples(self, steps: Sequence[Unread], read_names: ReadNames) -> Iterable[list[str]]:
        return [each.samples for each in steps]

    def describe_parts(self, step: Unread, drawn_from: str, components: dict[str, Any]) -> list[dict[str, Any]]:
        state = {name: value for name, value in components.items() if name != "tensors"}
        samples = combine(step.samples) if step.samples else ""
        loss = {"loss": float(step.numbers["loss"]).hex()} if "loss" in step.numbers else {}
        seen = {"samples": samples, "gradient": self._gradients.describe(), "state": state}
        facts = {name: value for name, value in seen.items() if value}
        return [{"rank": self.own_number, "generators": drawn_from, **facts, **loss}]
