"""A recipe that is built and ready to train in this process, with its progress."""

import os
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device

from holdfast import state
from holdfast.checkpoint import Saver, open_near
from holdfast.config import RunConfig
from holdfast.data import (
    Batches,
    Order,
    is_stream,
    list_divisors,
    make_batches,
)
from holdfast.errors import ConfigError, RecipeError
from holdfast.machine import heartbeats
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE
from holdfast.memory.pinning import pinning
from holdfast.recipe import Recipe
from holdfast.recipe.probe import Probe
from holdfast.training.begun_saves import BegunSaves
from holdfast.training.cooperation import Cooperation, SeparateRanks
from holdfast.training.first_batch import FirstBatch
from holdfast.training.flags import check_built_flags
from holdfast.training.grouping import Grouping
from holdfast.training.kept import GRADIENTS, list_contained
from holdfast.training.left_gradients import Gradients
from holdfast.training.optimizers import read_rates
from holdfast.training.placement import check_divided
from holdfast.training.program import Program, build_program
from holdfast.training.progress import Stage, TrainingProgress
from holdfast.training.schedulers import Schedulers, copy_built
from holdfast.training.step_record import StepRecord, choose_every
from holdfast.training.structure import Structure, has_own_loading
from holdfast.training.synchronizing import Synchronized

NO_BATCH = "use more data, a smaller batch, or a loader without drop_last"


@dataclass(frozen=True)
class AsBuilt:
    """A training as its recipe built it, with which later steps and a resume are compared.

    Attributes:
        flags: torch's settings after the recipe was built; see `determinism.read_flags`.
        grouping: the parameter groups.
        structure: the layers and tensors of the modules.
        hyperparameters: the hyperparameters of optimizer and schedulers; see `copy_built`.
    """

    flags: dict[str, Any]
    grouping: Grouping
    structure: Structure
    hyperparameters: dict[str, Any]


@dataclass
class Probes:
    """The probes of a training.

    Attributes:
        first: a stream's first micro-batch, on which the probe is measured.
        last: the probe of the last checkpoint; None before it.
        touched: the values that the last probe's forward passes changed and that no checkpoint contains; see
            `undisturbed.ModelSnapshot`.
    """

    first: FirstBatch = field(default_factory=FirstBatch)
    last: Probe | None = None
    touched: dict[str, str] = field(default_factory=dict)


class Training:
    """A recipe that is built and ready to train in this process, at step 0.

    Attributes:
        program: the program that is trained: a recipe, or a loop of the user's own.
        own_steps_per_epoch: the number of steps of an epoch, as the recipe defines it.
        steps_per_epoch: the number of steps of an epoch in this process: fewer if a proof shortens epochs.
        order: the order of map-style data; None for a stream.
        schedulers: torch schedulers over the optimizers.
        synchronized: the modules that several ranks train together without DDP.
        ranks: how the ranks cooperate.
        gradients: the gradients that a step keeps for the next step, in a loop or in a ``Recipe(step=...)``; None if
            each step begins without gradients.
        generators: the states of the random generators from which training draws.
        as_built: the parts that later steps and a resume are compared with; see `AsBuilt`.
        probes: the probes and the batch on which they are measured; see `Probes`.
        parent: the content id of the last checkpoint that is complete on the store; empty if there is none.
        saver: writes checkpoints in the background, one at a time.
        record: the steps since the last save.
        begun: the last saves that were begun; see `BegunSaves`.
        stage: where this rank is within a step; see `Stage`.
        notes: lines for a person that say how the training was built.

    Raises:
        RecipeError: the recipe can't be built.
        ConfigError: the recipe doesn't fit the configuration.
    """

    def __init__(self, config: RunConfig, program: Program | None = None) -> None:
        """
        Args:
            program: the program; built from the configuration if None.
        """
        self.config = config
        self.program = program = program or build_program(config)
        flags = check_built_flags(config.determinism)
        check_divided(config, self.recipe, self.accelerator)
        self.ranks = _make_ranks(config, program)
        self.ranks.seed(config.seed, keeps_seeds=program.keeps_seeds)
        self.order = self._order()
        self.batches = self._batches()
        self.own_steps_per_epoch = self._steps_per_epoch()
        self.steps_per_epoch = cut_epoch(self.own_steps_per_epoch)
        _check_anneals(self.recipe, self.own_steps_per_epoch)
        self.model, self.optimizer = program.prepare(config, self.ranks)
        self.synchronized = Synchronized(self.recipe, self.ranks)
        # FSDP2 doesn't copy the main rank's buffers to all ranks, so `synchronized` does.
        if config.compute.parallel == "fsdp" and not self.ranks.sums_gradients:
            self.synchronized.modules.append(self.recipe.model)
        gradients = self.recipe.extras.get(GRADIENTS)
        self.gradients = gradients if isinstance(gradients, Gradients) else None
        self.schedulers = Schedulers(self.recipe, self.steps_per_epoch)
        self.as_built = AsBuilt(
            flags,
            Grouping(self.recipe, program.advice.stepped, list_contained(self.recipe)),
            Structure(_list_roots(self.recipe)),
            copy_built(self.optimizer, self.schedulers, self.recipe),
        )
        # The stages of a pipeline would choose different numbers, but have to compute checksums at the same steps: they
        # use the smallest number.
        every = choose_every(self.model)
        self.record = StepRecord(min(self.ranks.gather(every)) if self.ranks.stages is not None else every)
        self.progress = TrainingProgress()
        self.probes = Probes()
        self.parent = ""
        part_bytes, near, pin = config.checkpoint.part_bytes, open_near(config), pinning(self.accelerator.device)
        # Let fewer checkpoints share a file than the run keeps: if the file is damaged, an older checkpoint is still
        # intact.
        self.saver = Saver(part_bytes, shared_by=max(1, config.retention.keep_last - 1), pin=pin, near=near)
        # how many micro-batches of a stream the last resume read again, and how many seconds that took
        self.replayed: dict[str, float] | None = None
        self._has_begun = False  # whether `begin_data` has set the data's position
        self.begun = BegunSaves()
        self.stage = Stage.SETTLED
        self.generators = state.Generators()
        self.notes: list[str] = []

    @property
    def accelerator(self) -> Accelerator:
        return self.program.accelerator

    @property
    def recipe(self) -> Recipe:
        """Return the program's recipe; see `Program`."""
        return self.program.recipe

    @property
    def settings(self) -> dict[str, Any]:
        return self.program.settings

    @property
    def scheduler_type(self) -> str:
        """Return the name of the schedulers' classes, for the checkpoint's metadata."""
        return "+".join(self.schedulers.names) or "NoneType"

    def _order(self) -> Order | None:
        recipe: Recipe = self.recipe
        if recipe.batch_size is None:
            return None
        size = recipe.batch_size
        if size % self.ranks.shares:
            raise ConfigError(
                f"compute.ranks = {self.ranks.number}: a batch of {size} samples can't be divided evenly over ranks",
                hint=f"these numbers of ranks divide the batch: {list_divisors(size)}",
            )
        if is_stream(recipe.data):
            return None
        order = Order(len(recipe.data), recipe.batch_size, recipe.grad_accum, self.config.seed)  # type: ignore[arg-type]
        if order.steps_per_pass < 1:
            raise RecipeError(
                f"the data has {order.samples} samples, but one step needs {recipe.batch_size} x {recipe.grad_accum}",
                hint="use more data, or a smaller batch_size",
            )
        return order

    def _steps_per_epoch(self) -> int:
        steps = self.recipe.steps_per_epoch or (self.order.steps_per_pass if self.order else 0)
        if not steps and self.recipe.batch_size is None and isinstance(self.recipe.data, Sized):
            batches = len(self.recipe.data)
            steps = batches // self.recipe.grad_accum
            if not steps:
                raise RecipeError(
                    f"the loader yields {batches} batches in a pass, but one step takes {self.recipe.grad_accum}",
                    hint=NO_BATCH,
                )
        if not steps:
            raise RecipeError(
                "the data is iterable without a length, so the number of steps in an epoch isn't known",
                hint="set Recipe(steps_per_epoch=...)",
            )
        return steps

    def _batches(self) -> Any:
        recipe, seed, workers = self.recipe, self.config.seed, self.config.compute.loader_workers
        if recipe.batch_size is None:
            recipe.data = self.program.take_data()
            size = getattr(recipe.data, "batch_size", None) or 1
            return make_batches(recipe.data, self.ranks.list_shares(size), seed, workers, self.ranks)
        shares = self.ranks.list_shares(recipe.batch_size)
        return Batches(recipe.data, recipe.collate, self.order, shares, recipe.grad_accum, seed, workers)

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples per step over all ranks; the number of batches if the batch size isn't known."""
        return (self.program.batch_size or 1) * self.recipe.grad_accum

    @property
    def batches_per_step(self) -> int:
        """Return the number of micro-batches that this rank takes in a step."""
        return self.recipe.grad_accum * len(self.ranks.counts)

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def lrs(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return read_rates(self.optimizer)

    @property
    def can_survive(self) -> bool:
        """Return whether one rank can save the state alone after another rank is lost; see `lone_save`."""
        compute = self.config.compute
        is_on_cpu = self.accelerator.device.type == "cpu"
        is_whole = self.ranks.has_common_state and compute.parallel == "ddp"
        has_all = is_whole and self.program.can_go_back and self.order is not None
        return has_all and self.ranks.has_others and is_on_cpu and not compute.has_nodes

    def begin_data(self, saved: Any = None, watch: Any = lambda done, total: None) -> bool:
        """Move the data's position to the first micro-batch of the next step; see `Batches.begin`.

        Return True if a stream had to be read again from its beginning.
        """
        self._has_begun = True
        step = self.progress.step
        return bool(self.batches.begin(step, max(self.total_steps, step), saved, watch))

    def next_batch(self, *, is_moved: bool = True) -> tuple[str, Any]:
        """Return the name of the samples in this rank's next micro-batch, and the micro-batch.

        The micro-batch is on this rank's device unless ``is_moved`` is False.
        """
        if not self._has_begun:
            self.begin_data()
        heartbeats.mark(heartbeats.Place.LOADING)
        samples, batch = next(self.batches)
        heartbeats.mark(heartbeats.Place.COMPUTING)
        if not self.record.is_grouped:
            self.record.is_grouped = True
            if self.ranks.has_groups:
                self.ranks.gather_samples(samples)  # raises an error for wrong samples before the first step is trained
        if self.order is None and self.progress.step == 0:
            self.probes.first.keep(batch, self.ranks.gather)
        return samples, send_to_device(batch, self.accelerator.device) if is_moved else batch

    @property
    def has_probe_batch(self) -> bool:
        """Return whether `probe_batch` has a micro-batch: always for map-style data; for a stream once it is read."""
        return self.order is not None or bool(self.probes.first.text)

    def probe_batch(self, ranks: int | None = None) -> Any:
        """Return the main rank's part of the first micro-batch, on this rank's device; see `Batches.first`."""
        batch = self.batches.first(ranks) if self.order is not None else self.probes.first.read()
        return send_to_device(batch, self.accelerator.device)

    def set_anneals(self, ahead: int = 0) -> dict[str, float]:
        """Set every anneal to its value for a step. Return the values by name.

        Args:
            ahead: 0 for the next step, 1 for the step after it.
        """
        step = self.progress.step + ahead + self.progress.anneal_offset
        for anneal in self.recipe.anneals.values():
            anneal.value = anneal.at(step, self.steps_per_epoch)
        return self.anneals

    @property
    def anneals(self) -> dict[str, float]:
        """Return the current value of each anneal, by name."""
        return {name: anneal.value for name, anneal in self.recipe.anneals.items()}


def cut_epoch(steps: int) -> int:
    """Return the number of steps of an epoch, at most the limit that `holdfast prove` sets in the environment.

    With shorter epochs, the few steps of a proof cross the end of an epoch.
    """
    longest = int(os.environ.get(LONGEST_EPOCH_VARIABLE, "0"))
    return min(steps, longest or steps)


def _make_ranks(config: RunConfig, program: Program) -> Cooperation:
    """Return how the ranks of a configuration cooperate.

    Raises:
        ConfigError: no extension makes the cooperation, or it can't train this program.
    """
    if not config.compute.is_rank_invariant:
        return SeparateRanks(program.accelerator, program.data_ranks)
    # imported late, because few runs need it
    from holdfast.extending import load_point

    if (make := load_point("cooperation")) is None:
        raise ConfigError(
            f"{config.compute.invariance}: no installed extension trains the same bytes on any number of ranks",
            hint="install the complete package of Holdfast",
        )
    return cast(Cooperation, make(config, program.recipe, program.accelerator, program.data_ranks))


def _list_roots(recipe: Recipe) -> dict[str, torch.nn.Module]:
    """Return the modules that `Structure` checks, by the prefix of their layers' names.

    They are the model, the modules among the extras and the modules in kept containers. A module whose own code loads
    its ``state_dict`` is left out.
    """
    found: dict[str, Any] = {"": recipe.model} | {f"extras.{name}": each for name, each in recipe.extras.items()}
    found |= {f"extras.{name}": each for name, each in list_contained(recipe).items()}
    modules = {name: each for name, each in found.items() if isinstance(each, torch.nn.Module)}
    return {name: each for name, each in modules.items() if not has_own_loading(each)}


def _check_anneals(recipe: Recipe, steps_per_epoch: int) -> None:
    for name, anneal in recipe.anneals.items():
        start, end = anneal.bounds(steps_per_epoch)
        if end < start:
            raise ConfigError(f"anneal {name!r} ends at step {end:g}, before it begins at step {start:g}")
