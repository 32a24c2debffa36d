"""A recipe that is built and ready to train in this process, with its progress."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import (
    gather_object,
    send_to_device,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau

from holdfast import determinism, state
from holdfast.checkpoint import Saver
from holdfast.config import RunConfig
from holdfast.data import Batches, Order, Share, is_stream
from holdfast.errors import ConfigError, RecipeError
from holdfast.memory.pinning import pinning
from holdfast.probe import Probe
from holdfast.processes import LONGEST_EPOCH_VARIABLE
from holdfast.recipe import Recipe, build_recipe
from holdfast.schedule import Schedule
from holdfast.training.capturing import describe_built
from holdfast.training.checksums import choose_every, describe_components
from holdfast.training.devices import choose_cuda, make_accelerator
from holdfast.training.first_batch import FirstBatch

# The probe's "loss_window" is the mean loss of this many last steps.
WINDOW_STEPS = 20


@dataclass
class Progress:
    """The progress of a run. It is part of the state: equal runs have equal progress, whatever their chunks."""

    step: int = 0
    epoch_loss_sum: float = 0.0
    epoch_loss_steps: int = 0
    recent_losses: list[float] = field(default_factory=list)
    # If the run began with another run's weights: the steps that anneals count as done before step 0.
    anneal_offset: int = 0
    # One entry per completed epoch: avg_loss, lrs (of its last step, one per parameter group), metrics, and the anneals
    # of the step after it.
    history: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update({name: saved[name] for name in vars(self)})

    def add_loss(self, loss: float) -> None:
        """Add the loss of one more step."""
        self.epoch_loss_sum += loss
        self.epoch_loss_steps += 1
        self.recent_losses = [*self.recent_losses[1 - WINDOW_STEPS :], loss]

    @property
    def avg_loss(self) -> float | None:
        """Return the mean loss of this epoch so far, or of the last epoch if this one has no step yet."""
        if self.epoch_loss_steps:
            return self.epoch_loss_sum / self.epoch_loss_steps
        return self.history[-1]["avg_loss"] if self.history else None


@dataclass
class Unread:
    """A finished step whose loss and gradient norm are still on the device."""

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor
    lrs: list[float]
    anneals: dict[str, float]
    samples: str


class Training:
    """A recipe that is built and ready to train in this process, at step 0.

    Attributes:
        own_steps_per_epoch: the recipe's own length of an epoch.
        steps_per_epoch: the length of an epoch in force, which a proof may cut.
        order: the order of map-style data; None for a stream.
        schedulers: torch schedulers over the optimizer.
        generators: the states of the random generators that training draws from.
        flags: torch's settings after the recipe was built; see `determinism.read_flags`.
        built: the hyperparameters as the recipe built them.
        first: a stream's first micro-batch, for the probe.
        parent: the content id of the last durable checkpoint; empty for none.
        saver: writes checkpoints in the background, one at a time.
        metrics: the trail since the last checkpoint, a line per step.
        first_lrs: the rates of the first step of each epoch that has begun. Part of the metadata, not of the state.
        is_detailed: whether each line of the trail has the checksums of all components and tensors, for a proof.

    Raises:
        RecipeError: the recipe can't be built.
        ConfigError: the recipe doesn't fit the configuration.
    """

    def __init__(self, config: RunConfig) -> None:
        use_cuda = choose_cuda(config.compute)
        determinism.apply(config.determinism, config.seed)
        self.config = config
        determinism.check(config.determinism, "before the recipe is built")
        self.recipe, self.settings = build_recipe(config.recipe, config.settings)
        determinism.check(config.determinism, "after the recipe was built")
        self.flags = determinism.read_flags()
        self.accelerator = make_accelerator(config.compute, self.recipe.grad_accum, use_cuda=use_cuda)
        # Every rank builds the same model with the same seed. From here on each rank draws numbers of its own.
        determinism.reseed(config.seed + self.accelerator.process_index)
        self.order = self._order()
        self.own_steps_per_epoch = self._steps_per_epoch()
        # `holdfast prove` cuts epochs, so that its few steps cross the end of one.
        longest = int(os.environ.get(LONGEST_EPOCH_VARIABLE, "0"))
        self.steps_per_epoch = min(self.own_steps_per_epoch, longest or self.own_steps_per_epoch)
        self.batches = self._batches()
        _check_anneals(self.recipe, self.own_steps_per_epoch)
        self.model, self.optimizer = self.accelerator.prepare(self.recipe.model, self.recipe.optimizer)
        schedule = self.recipe.schedule
        self.schedulers = _build_schedulers(self.recipe, self.steps_per_epoch)
        names = [type(scheduler).__name__ for scheduler in self.schedulers]
        self.scheduler_type = schedule.name if isinstance(schedule, Schedule) else "+".join(names) or "NoneType"
        self.built = describe_built(self)
        self.progress = Progress()
        self.first = FirstBatch()
        self.parent = ""
        # Fewer checkpoints share a file than are kept, so that a fallback has a file of its own.
        self.saver = Saver(
            config.checkpoint.part_bytes,
            shared_by=max(1, config.retention.keep_last - 1),
            pin=pinning(self.accelerator.device),
        )
        self.probe: Probe | None = None  # the last checkpoint's
        self.replayed: dict[str, float] | None = None  # micro-batches and seconds of the last reread of a stream
        self.metrics: list[dict[str, Any]] = []
        self.first_lrs: list[list[float]] = []
        self.measured: dict[str, float | None] = {}  # the last epoch's metrics that are not part of the state
        self._unread: list[tuple[Unread, dict[str, Any]]] = []  # each with the further fields of its line
        self._has_begun = False
        self.is_detailed = False
        self._checksum_every = choose_every(self)
        self.generators = state.Generators()

    def _order(self) -> Order | None:
        recipe: Recipe = self.recipe
        ranks = self.accelerator.num_processes
        if recipe.batch_size % ranks:
            raise ConfigError(f"compute.ranks = {ranks}: the batch of {recipe.batch_size} can't be shared out evenly")
        if is_stream(recipe.data):
            return None
        order = Order(len(recipe.data), recipe.batch_size, recipe.grad_accum, self.config.seed)  # type: ignore[arg-type]
        if order.steps_per_pass < 1:
            raise RecipeError(
                f"the data has {order.samples} samples, but one step takes {recipe.batch_size} x {recipe.grad_accum}",
                hint="more data, or a smaller batch_size",
            )
        return order

    def _steps_per_epoch(self) -> int:
        steps = self.recipe.steps_per_epoch or (self.order.steps_per_pass if self.order else 0)
        if not steps:
            raise RecipeError(
                "the data is iterable, so that its length isn't known", hint="set Recipe(steps_per_epoch=...)"
            )
        return steps

    def _batches(self) -> Batches:
        share = Share(self.recipe.batch_size, self.accelerator.process_index, self.accelerator.num_processes)
        workers = self.config.compute.loader_workers
        recipe = self.recipe
        return Batches(recipe.data, recipe.collate, self.order, share, recipe.grad_accum, self.config.seed, workers)

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def lrs(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def describe_schedulers(self) -> list[str]:
        """Return each scheduler's name and its count of steps or epochs, such as ``linear at step 40``."""
        names = [type(scheduler).__name__ for scheduler in self.schedulers]
        if isinstance(self.recipe.schedule, Schedule):
            names = [self.recipe.schedule.name]
        units = ["epoch" if waits_for_plateau(scheduler) else "step" for scheduler in self.schedulers]
        counts = [getattr(scheduler, "last_epoch", None) for scheduler in self.schedulers]  # a count of step() calls
        described = zip(names, units, counts, strict=True)
        return [name if count is None else f"{name} at {unit} {count}" for name, unit, count in described]

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all ranks pass, by rank."""
        return gather_object([value]) if self.accelerator.num_processes > 1 else [value]

    def begin_data(self, saved: Any = None, watch: Any = lambda done, total: None) -> bool:
        """Put the data at the first micro-batch of the next step; see `Batches.begin`."""
        self._has_begun = True
        step = self.progress.step
        return self.batches.begin(step, max(self.total_steps, step), saved, watch)

    def next_batch(self) -> tuple[str, Any]:
        """Return this rank's next micro-batch, on its device, after the name of its samples."""
        if not self._has_begun:
            self.begin_data()
        samples, batch = next(self.batches)
        if self.order is None and self.progress.step == 0:
            self.first.keep(batch, self.gather)
        return samples, send_to_device(batch, self.accelerator.device)

    @property
    def has_probe_batch(self) -> bool:
        """Return whether `probe_batch` has a micro-batch: always for map-style data, for a stream if it was kept."""
        return self.order is not None or bool(self.first.text)

    def probe_batch(self) -> Any:
        """Return the main rank's part of the first micro-batch, on this rank's device."""
        batch = self.batches.first() if self.order is not None else self.first.read()
        return send_to_device(batch, self.accelerator.device)

    def set_anneals(self) -> dict[str, float]:
        """Set every anneal to its value for the next step. Return the values by name."""
        step = self.progress.step + self.progress.anneal_offset
        for anneal in self.recipe.anneals.values():
            anneal.value = anneal.at(step, self.steps_per_epoch)
        return self.anneals

    @property
    def anneals(self) -> dict[str, float]:
        """Return the current value of each anneal, by name."""
        return {name: anneal.value for name, anneal in self.recipe.anneals.items()}

    def record_step(self, unread: Unread) -> None:
        """Record a finished step. Its numbers stay on the device until `read_metrics`, so that nothing waits for it."""
        self.progress.step = unread.step
        if (unread.step - 1) % self.steps_per_epoch == 0:
            self.first_lrs.append(unread.lrs)
        facts: dict[str, Any] = {"rng": self.generators.digest()}
        if self.is_detailed or unread.step % self._checksum_every == 0:
            facts["state"] = describe_components(self, in_detail=self.is_detailed)
        self._unread.append((unread, facts))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read the numbers of finished steps from the device; return a line per step since the last checkpoint."""
        if self._unread:
            numbers = torch.stack([torch.stack([each.loss, each.grad_norm]) for each, _ in self._unread])
            for (each, facts), (loss, norm) in zip(self._unread, self._mean(numbers).tolist(), strict=True):
                self.progress.add_loss(loss)
                epoch = (each.step - 1) // self.steps_per_epoch + 1
                line = {"step": each.step, "epoch": epoch, "loss": loss, "grad_norm": norm, "lrs": each.lrs}
                anneals = {"anneals": each.anneals} if each.anneals else {}
                self.metrics.append(line | anneals | {"samples": each.samples, **facts})
            self._unread.clear()
        return self.metrics

    def _mean(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(numbers, "mean") if self.accelerator.num_processes > 1 else numbers


def _check_anneals(recipe: Recipe, steps_per_epoch: int) -> None:
    for name, anneal in recipe.anneals.items():
        start, end = anneal.bounds(steps_per_epoch)
        if end < start:
            raise ConfigError(f"anneal {name!r} ends at step {end:g}, before it begins at step {start:g}")


def _build_schedulers(recipe: Recipe, steps_per_epoch: int) -> list[Any]:
    schedule = recipe.schedule
    if schedule is None:
        return []
    if isinstance(schedule, Schedule):
        return [schedule.build(recipe.optimizer, steps_per_epoch)]
    return list(schedule) if isinstance(schedule, Sequence) else [schedule]


def waits_for_plateau(scheduler: Any) -> bool:
    """Return whether the scheduler is stepped at the end of an epoch, with the epoch's loss."""
    return isinstance(scheduler, ReduceLROnPlateau)
