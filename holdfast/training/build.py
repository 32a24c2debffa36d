"""A recipe that is built and ready to train in this process, with its progress."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device

from holdfast import state
from holdfast.checkpoint import Saver
from holdfast.checkpoint.shown import Gallery
from holdfast.config import RunConfig
from holdfast.data import (
    Batches,
    Order,
    Share,
    combine,
    is_stream,
    list_divisors,
    make_batches,
    refuse_inexact,
    take_apart,
)
from holdfast.errors import ConfigError, RecipeError
from holdfast.machine import determinism, heartbeats
from holdfast.machine.heartbeats import Place
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE
from holdfast.memory.pinning import pinning
from holdfast.recipe import Recipe, Stateful
from holdfast.recipe.function import build_recipe
from holdfast.recipe.probe import Probe
from holdfast.state import capture_rng, digest_rng, is_sharded
from holdfast.training.begun_saves import BegunSaves
from holdfast.training.capturing import copy_built
from holdfast.training.checksums import choose_every, describe_components
from holdfast.training.detail import describe_parts
from holdfast.training.devices import prepare_device
from holdfast.training.first_batch import FirstBatch
from holdfast.training.grouping import Grouping
from holdfast.training.optimizers import Optimizers, read_rates
from holdfast.training.own_loop.kept import GRADIENTS, PRUNED, Kept
from holdfast.training.own_loop.left_gradients import Gradients
from holdfast.training.own_loop.pruned import find_pruned
from holdfast.training.progress import OWN_FIELDS, Stage, TrainingProgress, Unread
from holdfast.training.schedulers import Schedulers
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.model import check_sharding, place_model
from holdfast.training.structure import Structure, has_own_loading
from holdfast.training.synchronizing import Synchronized
from holdfast.training.virtual_ranks.elementwise import check_elementwise
from holdfast.training.virtual_ranks.step import VirtualRanks, make_virtual

NO_BATCH = "more data, a smaller batch, or a loader without drop_last"


@dataclass(frozen=True)
class Program:
    """A recipe that is built and ready for a `Training`, or a loop's objects in the form of a recipe.

    Attributes:
        settings: the settings that it was built with, defaults included.
    """

    accelerator: Accelerator
    recipe: Recipe
    settings: dict[str, Any]


def build_program(config: RunConfig) -> Program:
    """Make this process deterministic, and build a configuration's recipe in it.

    Raises:
        RecipeError: the recipe can't be built.
        ConfigError: the recipe doesn't fit the configuration.
    """
    accelerator = prepare_device(config)
    return Program(accelerator, *build_recipe(config.recipe, config.settings, accelerator.device))


class Training:
    """A recipe that is built and ready to train in this process, at step 0.

    Attributes:
        kept: what a loop of the user's own keeps; None if the engine's loop trains a recipe.
        own_steps_per_epoch: the recipe's own length of an epoch.
        steps_per_epoch: the length of an epoch in force, which a proof may cut.
        order: the order of map-style data; None for a stream.
        schedulers: torch schedulers over the optimizers.
        synchronized: the modules that several ranks train together without DDP.
        virtual: the shares of a step that this rank trains; None without virtual ranks.
        exchange: the ranks that save and restore a sharded state together; None until they do; see `exchange_of`.
        gradients: the gradients that a step of the user's own leaves for the next one; None for the engine's.
        generators: the states of the random generators that training draws from.
        flags: torch's settings after the recipe was built; see `determinism.read_flags`.
        grouping: the parameter groups as the recipe built them.
        structure: the layers and tensors of the modules as the recipe built them.
        built: the hyperparameters as the recipe built them.
        first: a stream's first micro-batch, for the probe.
        touched: what the model's calls in the last probe changed, and no checkpoint has; see
            `undisturbed.ModelSnapshot`.
        parent: the content id of the last durable checkpoint; empty for none.
        saver: writes checkpoints in the background, one at a time.
        metrics: the trail since the last checkpoint, a line per step.
        gallery: the texts and pictures that were shown since the last checkpoint.
        first_lrs: the rates of the first step of each epoch that has begun. Part of the metadata, not of the state.
        trained: the step that was trained last, for `record_step`.
        is_detailed: whether each line of the trail has the checksums of all components and tensors, and the facts of
            each rank or share, for a proof.
        is_rehearsal: whether other ranks train these steps, too, and this process ends after them.
        unsaved_s: seconds of rehearsed steps since the last save.
        note_lines: called with the trail since the last save whenever it was read.
        drawn_from: a digest of the generators at the beginning of the step, if `is_detailed`.
        begun: the last saves, which this rank leaves to the main rank.
        stage: whether the state is that after the last completed step.
        notes: lines for a person about how it was built.
        is_alone: whether this rank goes on without the others, because one of them is lost; see `surviving`.

    Raises:
        RecipeError: the recipe can't be built.
        ConfigError: the recipe doesn't fit the configuration.
    """

    def __init__(self, config: RunConfig, program: Program | None = None) -> None:
        """
        Args:
            program: the program, if it is built already.
        """
        self.config = config
        program = program or build_program(config)
        self.accelerator, self.recipe, self.settings = program.accelerator, program.recipe, program.settings
        self.kept = self.recipe if isinstance(self.recipe, Kept) else None
        determinism.check(config.determinism, "after the recipe was built")
        self.flags = determinism.read_flags()
        check_sharding(config, self.recipe, self.accelerator)
        self.virtual = make_virtual(config, self.recipe, self.accelerator)
        self.exchange: Exchange | None = None
        self.is_alone = False
        self._separate_ranks()
        self.order = self._order()
        self.batches = self._batches()
        self.own_steps_per_epoch = self._steps_per_epoch()
        self.steps_per_epoch = cut_epoch(self.own_steps_per_epoch)
        _check_anneals(self.recipe, self.own_steps_per_epoch)
        self.model: Any = self.recipe.model
        self.optimizer: Any = self.recipe.optimizer
        if self.kept is None:
            self._prepare()
        elif self.virtual is not None:
            self.virtual.attach(self._find_trained(self.kept))
        self.synchronized = Synchronized(self.recipe, self.accelerator)
        if config.compute.parallel == "fsdp" and self.virtual is None:  # which leaves each rank its own buffers
            self.synchronized.modules.append(self.recipe.model)
        gradients = self.recipe.extras.get(GRADIENTS)
        self.gradients = gradients if isinstance(gradients, Gradients) else None
        self.schedulers = Schedulers(self.recipe, self.steps_per_epoch)
        self.scheduler_type = "+".join(self.schedulers.names) or "NoneType"
        self.grouping = Grouping(self)
        self.structure = Structure(_list_roots(self.recipe))
        self.built = copy_built(self)
        self.progress = TrainingProgress()
        self.first = FirstBatch()
        self.parent = ""
        # Fewer checkpoints share a file than are kept, so that a fallback has a file of its own.
        self.saver = Saver(
            config.checkpoint.part_bytes,
            shared_by=max(1, config.retention.keep_last - 1),
            pin=pinning(self.accelerator.device),
        )
        self.probe: Probe | None = None  # the last checkpoint's
        self.touched: dict[str, str] = {}
        self.replayed: dict[str, float] | None = None  # micro-batches and seconds of the last reread of a stream
        self.metrics: list[dict[str, Any]] = []
        self.gallery = Gallery()
        self.first_lrs: list[list[float]] = []
        self.measured: dict[str, float | None] = {}  # the last epoch's metrics that are not part of the state
        self.trained: Unread | None = None
        self._unread: list[tuple[Unread, dict[str, Any]]] = []  # each with the further fields of its line
        self._has_begun = False
        self.is_detailed = self.is_rehearsal = False
        self.unsaved_s = 0.0
        self.note_lines: Callable[[Sequence[Mapping[str, Any]]], object] = lambda lines: None
        self.drawn_from = ""
        self.begun = BegunSaves()
        self.stage = Stage.SETTLED
        self._checksum_every = choose_every(self)
        self.generators = state.Generators()
        self.notes: list[str] = []

    def _prepare(self) -> None:
        """Move the recipe's modules to the device, and let accelerate wrap what the engine's step takes."""
        recipe, accelerator = self.recipe, self.accelerator
        if isinstance(recipe.optimizer, Mapping):
            recipe.optimizer = Optimizers(recipe.optimizer)  # type: ignore[assignment]
        if self.virtual is not None and self.virtual.is_cut:
            check_elementwise(recipe.optimizer, accelerator.device)
        place_model(self.config, recipe, accelerator)
        if self.virtual is not None:
            self.virtual.attach([recipe.model])
        for name, extra in recipe.extras.items():
            refuse_inexact(f"Recipe(extras={{{name!r}: ...}})", extra)
            if isinstance(extra, torch.nn.Module) and not any(map(is_sharded, extra.parameters())):
                extra.to(accelerator.device)
        pruned = None if any(map(is_sharded, recipe.model.parameters())) else find_pruned(recipe.model)
        if pruned is not None:
            self._add_own(PRUNED, pruned)
        optimizer: Any = recipe.optimizer
        if accelerator.scaler is not None and (recipe.step is not None or isinstance(optimizer, Optimizers)):
            raise ConfigError(
                'compute.mixed_precision = "fp16": one GradScaler can\'t serve several optimizers or a step of its own',
                hint='mixed_precision = "bf16", or a loop of your own with run.accelerator',
            )
        if recipe.step is not None:
            recipe.model.to(accelerator.device)
            self._add_own(GRADIENTS, Gradients(recipe.model, optimizer))
            self.optimizer = optimizer
            return
        accelerator.gradient_accumulation_steps = recipe.grad_accum
        if self.virtual is None and self.config.compute.parallel == "ddp":
            # Each step begins without gradients, so that views of the buckets are safe, and save a copy of them.
            accelerator.ddp_handler.gradient_as_bucket_view = True
            self.model = accelerator.prepare(recipe.model)
        else:  # virtual ranks sum the gradients themselves, and shares have theirs: no DDP wraps the model
            self.model = accelerator.prepare_model(recipe.model, evaluation_mode=True)
        if isinstance(optimizer, Optimizers):
            self.optimizer = Optimizers({name: accelerator.prepare(part) for name, part in optimizer.parts.items()})
        else:
            self.optimizer = accelerator.prepare(optimizer)

    def _find_trained(self, kept: Kept) -> list[torch.nn.Module]:
        """Return the modules of a loop whose gradients virtual ranks sum.

        Raises:
            ConfigError: ranks can't train them to the same bits.
        """
        if self.virtual is not None and self.virtual.is_cut:
            check_elementwise(kept.optimizer, self.accelerator.device)
        return list(kept.trained.values())

    def _separate_ranks(self) -> None:
        """Give each rank random numbers of its own, after all have built the same model from the same seed.

        A loop that has seeded its ranks itself keeps its seeds. With virtual ranks each share has numbers of its own.
        """
        if self.virtual is not None:
            return determinism.reseed(self.config.seed)
        seed, rank = self.config.seed, self.accelerator.process_index
        if self.kept is not None:
            states = self.gather(digest_rng(capture_rng()))
            if rank == 0 or states[rank] != states[0]:
                return None
        return determinism.reseed(seed + rank)

    def _order(self) -> Order | None:
        recipe: Recipe = self.recipe
        if recipe.batch_size is None:
            return None
        ranks = self.accelerator.num_processes
        if recipe.batch_size % ranks and self.virtual is None:
            raise ConfigError(
                f"compute.ranks = {ranks}: a batch of {recipe.batch_size} samples can't be shared out evenly",
                hint=f"numbers that can share it out: {list_divisors(recipe.batch_size)}",
            )
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
        if not steps and self.recipe.batch_size is None and isinstance(self.recipe.data, Sized):
            batches = len(self.recipe.data)
            steps = batches // self.recipe.grad_accum
            if not steps:
                raise RecipeError(
                    f"the loader gives {batches} batches, but one step takes {self.recipe.grad_accum}", hint=NO_BATCH
                )
        if not steps:
            raise RecipeError(
                "the data is iterable, so that its length isn't known", hint="set Recipe(steps_per_epoch=...)"
            )
        return steps

    def _add_own(self, name: str, extra: Stateful) -> None:
        """Add an extra of Holdfast's own to those of the recipe."""
        if name in self.recipe.extras:
            raise RecipeError(f"extras: the name {name!r} is taken", hint="give the extra another name")
        self.recipe.extras = {**self.recipe.extras, name: extra}

    def _batches(self) -> Any:
        recipe, seed, workers = self.recipe, self.config.seed, self.config.compute.loader_workers
        if recipe.batch_size is None:
            if self.kept is None:
                recipe.data = take_apart(recipe.data, "Recipe(data=dataset, batch_size=...)")
            size = getattr(recipe.data, "batch_size", None) or 1
            return make_batches(recipe.data, self._shares(size), seed, workers, self.gather)
        shares = self._shares(recipe.batch_size)
        return Batches(recipe.data, recipe.collate, self.order, shares, recipe.grad_accum, seed, workers)

    def _shares(self, batch_size: int) -> list[Share]:
        """Return the parts of each batch that this rank trains, one after the other."""
        if self.virtual is not None:
            return [Share(batch_size, turn.share, self.virtual.shares) for turn in self.virtual.turns]
        return [Share(batch_size, self.accelerator.process_index, self.accelerator.num_processes)]

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples of a step over all ranks; of batches whose size isn't known, of batches."""
        size = self.recipe.batch_size or (getattr(self.recipe.data, "batch_size", None) if self.kept is None else None)
        return (size or 1) * self.recipe.grad_accum

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def lrs(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return read_rates(self.optimizer)

    @property
    def has_others(self) -> bool:
        """Return whether other ranks train with this one."""
        return self.accelerator.num_processes > 1 and not self.is_alone

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes what one rank writes for all: the main one, or the one that is alone."""
        return self.is_alone or bool(self.accelerator.is_main_process)

    @property
    def can_survive(self) -> bool:
        """Return whether one rank can save alone when another is lost; `surviving` says what it needs for that."""
        compute = self.config.compute
        is_on_cpu = self.accelerator.device.type == "cpu"
        has_all = self.virtual is not None and not self.virtual.is_cut and self.kept is None and self.order is not None
        return has_all and self.has_others and is_on_cpu and not compute.has_nodes

    @property
    def has_new_steps(self) -> bool:
        """Return whether any step was completed since the last save was begun, or since a checkpoint was restored."""
        return bool(self.metrics or self._unread)

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all ranks pass, by rank."""
        return gather_object([value]) if self.has_others else [value]

    def begin_data(self, saved: Any = None, watch: Any = lambda done, total: None) -> bool:
        """Put the data at the first micro-batch of the next step; see `Batches.begin`."""
        self._has_begun = True
        step = self.progress.step
        return bool(self.batches.begin(step, max(self.total_steps, step), saved, watch))

    def next_batch(self, *, is_moved: bool = True) -> tuple[str, Any]:
        """Return this rank's next micro-batch, on its device unless ``is_moved`` is False, after its samples' name."""
        if not self._has_begun:
            self.begin_data()
        heartbeats.mark(Place.LOADING)
        samples, batch = next(self.batches)
        heartbeats.mark(Place.COMPUTING)
        if self.order is None and self.progress.step == 0:
            self.first.keep(batch, self.gather)
        return samples, send_to_device(batch, self.accelerator.device) if is_moved else batch

    @property
    def has_probe_batch(self) -> bool:
        """Return whether `probe_batch` has a micro-batch: always for map-style data, for a stream if it was kept."""
        return self.order is not None or bool(self.first.text)

    def probe_batch(self, ranks: int | None = None) -> Any:
        """Return the main rank's part of the first micro-batch, on this rank's device; see `Batches.first`."""
        batch = self.batches.first(ranks) if self.order is not None else self.first.read()
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

    def record_step(self) -> None:
        """Record the step in `trained`. Its numbers stay on the device until `read_metrics`, so that nothing waits."""
        unread, self.trained = self.trained, None
        assert unread is not None
        self.progress.step = unread.step
        if (unread.step - 1) % self.steps_per_epoch == 0:
            self.first_lrs.append(unread.lrs)
        facts: dict[str, Any] = {"rng": self.generators.digest()}
        if self.is_detailed or unread.step % self._checksum_every == 0:
            facts["state"] = describe_components(self, in_detail=self.is_detailed)
        if self.is_detailed and (self.accelerator.num_processes > 1 or self.virtual is not None):
            facts["parts"] = describe_parts(self, unread, facts["state"])
        self._unread.append((unread, facts))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read the numbers of finished steps from the device; return a line per step since the last checkpoint."""
        numbers = self._read_numbers()
        samples = self._read_samples()
        for each, facts in self._unread:
            own = {name: next(numbers) for name in each.numbers}
            if "loss" in own:
                self.progress.add_loss(own["loss"])
            epoch = (each.step - 1) // self.steps_per_epoch + 1
            line = {"step": each.step, "epoch": epoch, "lrs": each.lrs}
            line |= {name: own.pop(name) for name in OWN_FIELDS if name in own}
            others = {"logged": own, "anneals": each.anneals, "samples": next(samples)}
            self.metrics.append(line | {name: value for name, value in others.items() if value} | facts)
        if self._unread:
            self._unread.clear()
            self.note_lines(self.metrics)
        return self.metrics

    def drop_detail(self) -> None:
        """Leave of the lines since the last save what they have without `is_detailed`."""
        for line in self.metrics:
            line.pop("parts", None)
            line.get("state", {}).pop("tensors", None)
            if line["step"] % self._checksum_every:
                line.pop("state", None)

    def _read_numbers(self) -> Iterator[float]:
        """Return the numbers of all unread steps, one after the other; of several ranks or shares, their means."""
        if self.recipe.loss is None and self.accelerator.num_processes > 1:
            own = [[(name, number.dim()) for name, number in each.numbers.items()] for each, _ in self._unread]
            names = self.gather(own)
            if any(each != names[0] for each in names):
                raise RecipeError(
                    "the ranks have logged different numbers, whose means can't be taken",
                    hint="call run.log in all ranks alike" if self.kept else "return the same numbers in all ranks",
                )
        found = [number for each, _ in self._unread for number in each.numbers.values()]
        return iter(self._mean(found).tolist() if found else [])

    def _mean(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        """Return the means of some numbers. Those that shares have logged have a column for each share."""
        if self.virtual is None and self.accelerator.num_processes > 1:
            mean: torch.Tensor = self.accelerator.reduce(torch.stack(numbers), "mean")
            return mean
        of_shares = [each for each in numbers if each.dim()]
        if self.virtual is not None and of_shares:
            means = iter(self.virtual.mean(of_shares))
            numbers = [next(means) if each.dim() else each for each in numbers]
        return torch.stack(numbers)

    def _read_samples(self) -> Iterator[str]:
        """Return the name of each unread step's samples: this rank's, or with virtual ranks those of all shares."""
        own = [each.samples for each, _ in self._unread]
        if self.virtual is None:
            return (combine(names) if names else "" for names in own)
        if self.is_alone:
            return iter([combine(self._read_names(each, self.virtual)) for each, _ in self._unread])
        shares, names = zip(*self.gather((self.virtual.own, own)), strict=True)
        return (combine(_in_order(shares, ranks)) for ranks in zip(*names, strict=True))

    def _read_names(self, unread: Unread, virtual: VirtualRanks) -> list[str]:
        """Return the names of a step's micro-batches in all shares; load those of the shares of other ranks again."""
        others = [share for share in range(virtual.shares) if share not in virtual.own]
        read = self.batches.read_names(unread.step - 1, others)
        return _in_order([others, virtual.own], [read, unread.samples])


def _in_order(shares: Sequence[Sequence[int]], names: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of a step's micro-batches in the order of the shares, from the shares and names of each rank."""
    found: dict[int, Sequence[str]] = {}
    for own, all_names in zip(shares, names, strict=True):
        accum = len(all_names) // len(own)
        found |= {share: all_names[place * accum : (place + 1) * accum] for place, share in enumerate(own)}
    return [name for share in sorted(found) for name in found[share]]


def cut_epoch(steps: int) -> int:
    """Return the length of an epoch in force: `holdfast prove` cuts epochs, so that its few steps cross an end."""
    longest = int(os.environ.get(LONGEST_EPOCH_VARIABLE, "0"))
    return min(steps, longest or steps)


def _list_roots(recipe: Recipe) -> dict[str, torch.nn.Module]:
    """Return the modules whose layers a resume builds as they were, by a prefix for their names."""
    found: dict[str, Any] = {"": recipe.model} | {f"extras.{name}": each for name, each in recipe.extras.items()}
    modules = {name: each for name, each in found.items() if isinstance(each, torch.nn.Module)}
    return {name: each for name, each in modules.items() if not has_own_loading(each)}


def _check_anneals(recipe: Recipe, steps_per_epoch: int) -> None:
    for name, anneal in recipe.anneals.items():
        start, end = anneal.bounds(steps_per_epoch)
        if end < start:
            raise ConfigError(f"anneal {name!r} ends at step {end:g}, before it begins at step {start:g}")
