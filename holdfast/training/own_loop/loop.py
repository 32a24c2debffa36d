"""A user's own training loop, in a function that takes a `Run`. The engine saves and restores the loop's state.

``run.steps()`` yields one step after the other to the loop. Before the first step it restores the newest commit's state
into the kept objects. Between two steps it records the step, executes the attempt's orders and begins saves. At the
run's end, or at a stop, it ends the loop.
"""

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from torch import Tensor

from holdfast.checkpoint.found import ENDED, ITERATOR
from holdfast.checkpoint.shown import Shown, to_shown
from holdfast.config import RunConfig
from holdfast.data import NoBatches, is_endless, is_torch_loader, refuse_inexact, take_apart
from holdfast.errors import RecipeError
from holdfast.provenance.location import find_frames, find_place
from holdfast.recipe.anneal import Anneal
from holdfast.state import as_stateful, describe_unseeded, find_left_out, is_metric, list_unseeded, seed_unused
from holdfast.training.build import NO_BATCH, Training
from holdfast.training.data_ranks import DataRanks
from holdfast.training.kept import (
    FRAMEWORK,
    GRADIENTS,
    OWN_EXTRAS,
    Kept,
    Variable,
    list_checkpointed,
    sort_kept,
)
from holdfast.training.left_gradients import Gradients
from holdfast.training.own_loop.hints import list_hints
from holdfast.training.own_loop.variables import Holders, list_carried, list_iterators, read_constants, read_locals
from holdfast.training.own_loop.wrapping import Wrapping
from holdfast.training.passes import Taking
from holdfast.training.program import LoopProgram
from holdfast.training.sharded.model import Parallelize, find_mesh, list_fsdp_modules, shard_again
from holdfast.training.step_record import Unread, read_number
from holdfast.training.undisturbed import snapshot

T = TypeVar("T")
OPTIONS = {"grad_accum", "collate"}  # of `Run.batches`

# Yields before each step that the loop trains, as `holdfast.training.steps` does.
Serve = Callable[[Training], Generator[None, None, None]]


class Stopped(SystemExit):
    """Raised to end a loop, and the function around it, when the run is to stop and its state is saved."""


class Step:
    """One step of a loop, from `Run.steps`."""

    number: int
    """The number of steps that were completed before this step."""
    epoch: int
    """The number of epochs that were completed before this step."""
    is_last_of_epoch: bool
    """True if the epoch ends with this step."""

    def __init__(self, loop: "OwnLoop", number: int, per_epoch: int) -> None:
        """Private: `Run.steps` creates the steps."""
        self.number = number
        self.epoch, within = divmod(number, per_epoch)
        self.is_last_of_epoch = within + 1 == per_epoch
        self._loop = loop

    @property
    def is_rehearsal(self) -> bool:
        """Return whether this step is a rehearsal: new ranks train this step, too, and this process ends afterwards.

        It is also True for a step that a resume trains only to run the code at an epoch's end again, and whose effects
        are undone. Don't log such a step.
        """
        return self._loop.is_rehearsal

    @property
    def batch(self) -> Any:
        """Return the loader's next batch, on the run's device. A step may take several batches."""
        return self._loop.next_batch()

    def shares(self) -> Iterator[Any]:
        """Yield the batches that this rank trains in this step, on the run's device. Call ``backward`` for each batch.

        With ``compute.virtual_ranks``, Holdfast divides the step's batch into shares. This rank gets some of the
        shares, each with its own random numbers, and each share is yielded as ``grad_accum`` batches. After the last
        share, each parameter's gradient is the mean over all shares, with the same bits on any number of ranks.

        Without virtual ranks, the next ``grad_accum`` batches of this rank are yielded, and their gradients are added
        as usual.

        In both cases, divide each loss by ``grad_accum``. All gradients are None when the step begins. If several
        batches log the same number, their mean is recorded.

        Raises:
            RecipeError: `shares` was called in this step already, or there is a gradient that no optimizer has used.
        """
        return self._loop.take_shares()

    def log(self, **numbers: Any) -> None:
        """Record numbers of this step; see `Run.log`."""
        self._loop.log(numbers)

    def show(self, **shown: str | bytes) -> None:
        """Show texts and pictures of this step; see `Run.show`."""
        self._loop.show(shown)


@dataclass
class Noted:
    """The batches, numbers and pictures of the step in progress.

    Attributes:
        names: the names of the batches that the loop has taken in this step.
        numbers: the numbers that the loop has logged in this step, by name.
        ended: the numbers that the loop's code at an epoch's end has logged, if the save at that end came before the
            code.
        shown: the texts and pictures that the loop has shown in this step.
    """

    names: list[str] = field(default_factory=list)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    ended: dict[str, Tensor] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)


@dataclass(frozen=True)
class LoopInput:
    """The data of a loop, as `Run.steps` or `Run.epochs` got it.

    Attributes:
        loader: the loader as the loop has passed it; None without one.
        source: the user's loader inside ``loader`` if accelerate has prepared ``loader``; otherwise ``loader``.
        per_epoch: the number of steps of an epoch; None if it isn't known.
    """

    loader: Any = None
    source: Any = None
    per_epoch: int | None = None


@dataclass(frozen=True)
class Adopted:
    """A framework's values in the search for forgotten state.

    Attributes:
        objects: the objects that the search leaves out.
        list_variables: returns the values to search instead, each as a pair (name, value).
    """

    objects: Sequence[Any] = ()
    list_variables: Callable[[], list[tuple[str, Any]]] = list


@dataclass(frozen=True)
class _Begun:
    """The parts of a loop that exist from its first step on.

    Attributes:
        taking: the shares that the loop takes in each step.
        served: the generator that executes the attempt's orders.
        holders: the variables that must hold the kept objects.
        gradients: the gradients that a step keeps for the next step.
    """

    training: Training
    taking: Taking
    served: Generator[None, None, None]
    holders: Holders
    gradients: Gradients


class _Objects(dict[str, Any]):
    """The objects that `Run.keep` got, by name.

    Attributes:
        left_out: by an object's name, the names of its attributes that aren't kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, Sequence[str]] = {}


class OwnLoop:
    """The engine's side of a user's own loop: `Run` and the adapters of frameworks call it.

    Attributes:
        config: the whole configuration.
        settings: the configuration's ``[settings]``, completed by the function's defaults.
        accelerator: accelerate's accelerator for the configuration's device, precision and ranks.
        fields: the values of the fields of `Kept` that aren't objects from `Run.keep`, by the field's name.
        own: Holdfast's own objects that the user's code refers to; the search for forgotten state leaves them out.
        framework: the framework whose loop this is, set by the framework's adapter; see `Program`.
    """

    framework = ""

    def __init__(
        self, config: RunConfig, accelerator: Accelerator, function: Callable[..., object], settings: dict[str, Any],
        serve: Serve,
    ) -> None:  # fmt: skip
        """
        Args:
            function: the user's training function, whose first parameter is the `Run`.
            settings: the values of all other parameters.
        """
        self.config, self.settings, self.accelerator = config, settings, accelerator
        self.own: list[Any] = [self]
        self._function, self._serve = function, serve
        self._objects = _Objects()
        self._wrapping = Wrapping(config, accelerator)
        self.fields: dict[str, Any] = {"anneals": {}}
        self._adopted = Adopted()
        self._input = LoopInput()
        # the iterators that the loop has got from `Run`, by the method that returned them
        self._given: dict[str, Iterator[Any]] = {}
        self._begun: _Begun | None = None
        self._step: Step | None = None
        self._noted = Noted()
        # warnings for the user, each shown once; the keys are "keep NAME" for a kept object and "log NAME" for a logged
        # number
        self._warnings: dict[str, str] = {}
        self._has_ended = False
        self._is_at_end = False  # whether only the code after the present epoch's inner loop remains to be run
        self._has_ended_step = False  # whether `_end_step` was called for the present step
        # a function that restores the state with which this process resumed the run
        self._undo: Callable[[], None] | None = None

    # ---- the process

    @property
    def device(self) -> torch.device:
        """Return the device to train on."""
        return torch.device(self.accelerator.device)

    @property
    def is_rehearsal(self) -> bool:
        """Return whether this process ends after the present step; see `Step.is_rehearsal`."""
        record = None if self._begun is None else self._begun.training.record
        return record is not None and (record.is_rehearsal or record.ends.is_repeating)

    @property
    def mesh(self) -> Any:
        """Implement `Run.mesh`."""
        return find_mesh(self.config, self.accelerator)

    @property
    def data(self) -> DataRanks:
        """Return the data ranks."""
        return self._wrapping.data.ranks

    # ---- before the loop

    def taking_plugins(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a new ``Accelerator`` may have an FSDP2 plugin; see `Plugins`."""
        return self._wrapping.plugins.taken(self.located)

    def set_data_parallel(self, mesh: Any) -> None:
        """Implement `Run.data_parallel`."""
        if self._begun is not None:
            self.refuse("run.data_parallel(...) was called after the first step", hint="call it before the loop")
        with self.located():
            self._wrapping.data.set_mesh(mesh)

    def wrap(self, model: torch.nn.Module, parallelize: Parallelize | None) -> torch.nn.Module:
        """Implement `Run.wrap`."""
        if self._begun is not None:
            self.refuse("run.wrap(...) was called after the first step", hint="call it before the loop")
        with self.located():
            return self._wrapping.wrap(model, parallelize)

    def keep(self, objects: Mapping[str, Any], leave_out: Sequence[str] = ()) -> None:
        """Implement `Run.keep`."""
        if self._begun is not None:
            self.refuse("run.keep(...) was called after the first step", hint="call it before the loop")
        missing = {*leave_out}
        for name, each in objects.items():
            if name in self._objects or name in OWN_EXTRAS:
                self.refuse(f"run.keep({name}=...): the name is taken", hint="give it another name")
            if not isinstance(each, torch.nn.Module | torch.optim.Optimizer) or is_metric(each):
                with self.located():
                    refuse_inexact(f"run.keep({name}=...)", each)
                    stateful = as_stateful(name, each, leave_out=leave_out)
                    self._seed(name, each, stateful)
                    missing -= find_left_out(stateful, leave_out)
            self._objects[name], self._objects.left_out[name] = each, leave_out
        if missing:
            names = ", ".join(sorted(missing))
            self.refuse(
                f"run.keep(..., leave_out=...): none of these objects has an attribute {names}",
                hint="name attributes of objects without state_dict, or items of a dict",
            )

    def _seed(self, name: str, value: Any, stateful: Any) -> None:
        """Seed the generators of a kept object that have no seed. Warn about those that have drawn numbers already."""
        if (found := list_unseeded(name, value, stateful)) and (lines := seed_unused(found, self._spell_seed(name))):
            self._warnings[f"keep {name}"] = f"{find_place()}{describe_unseeded(name, lines)}"

    def _spell_seed(self, name: str) -> str:
        """Return the text from which the seed of a generator of this rank is derived."""
        rank = 0 if self.config.compute.is_rank_invariant else self._wrapping.data.use()
        return f"{self.config.seed}/{name}/{rank}"

    def make_generator(self, name: str, device: str | torch.device) -> torch.Generator:
        """Implement `Run.generator`."""
        seed = int.from_bytes(hashlib.sha256(self._spell_seed(name).encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(device).manual_seed(seed)
        self.keep({name: generator})
        return generator

    def add_anneal(self, name: str, anneal: Anneal) -> Anneal:
        """Implement `Run.anneal`."""
        self.fields["anneals"][name] = anneal
        return anneal

    @property
    def batch_number(self) -> int:
        """Implement `Run.batch_number`."""
        if self._begun is None or self._step is None:
            self.refuse("run.batch_number was read outside the loop", hint="read it in `for epoch in run.epochs(...):`")
        begin = self._step.epoch * self._length
        return self._training.program.skipped.count_outside(begin + 1, self._step.number)

    # ---- for adapters

    def adopt(self, objects: Iterable[Any], list_variables: Callable[[], list[tuple[str, Any]]]) -> None:
        """Set which of a framework's objects the search for forgotten state leaves out.

        Args:
            objects: the framework's objects.
            list_variables: returns the values to search instead, each as a pair (name, value).
        """
        self._adopted = Adopted([*objects], list_variables)

    def is_kept(self, value: Any) -> bool:
        """Return whether a value is one of the kept objects."""
        return any(each is value for each in self._objects.values())

    def _is_own(self, value: object) -> bool:
        return any(each is value for each in self.own)

    def find_name(self, value: Any) -> str:
        """Return the name of the loop's variable with this value; if there is none, the name of the value's class."""
        variables = (pair for frame in find_frames(self._function) for pair in read_locals(frame).items())
        return next((name for name, each in variables if each is value), type(value).__name__)

    def end_pass(self) -> None:
        """Begin a new pass over the loader with the next batch."""
        self._training.batches.end_pass()

    def snapshot(self) -> Callable[[], None]:
        """Copy the kept state of a resumed run, apart from weights and moments. Return a function that restores it.

        Code that ran before the checkpoint may run again after a resume, and its effects have to be undone. An adapter
        calls this after it has got the first step.
        """
        put_back = snapshot(self._training)

        def undo() -> None:
            with self.located():
                put_back()

        return undo

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Add the user's file and line to the message of an error that the block raises."""
        try:
            yield
        except RecipeError as error:
            self.refuse(error.message, error.hint)

    def refuse(self, message: str, hint: str = "") -> NoReturn:
        """Raise a RecipeError that begins with the user's file and line."""
        raise RecipeError(f"{find_place()}{message}", hint=hint)

    # ---- the loop

    def give_steps(self, loader: Any, per_epoch: int | None) -> Iterator[Step]:
        """Implement `Run.steps`."""
        if self._has_epochs:
            return self._give("steps", self._steps_of_epoch())
        if "steps" in self._given:
            self.refuse(
                "run.steps(...) was called twice: a run has one loop",
                hint="put the loop inside `for epoch in run.epochs(loader):` to train one epoch in each",
            )
        self._note_data(loader, per_epoch)
        return self._give("steps", self._all_steps())

    def give_epochs(self, loader: Any, per_epoch: int | None) -> Iterator[int]:
        """Implement `Run.epochs`."""
        if "steps" in self._given or self._has_epochs:
            self.refuse("run.epochs(...) was called twice: a run has one loop", hint="put both loops into one")
        self._note_data(loader, per_epoch)
        return self._give("epochs", self._all_epochs())

    def give_batches(self, data: Any, batch_size: int | None, options: Mapping[str, Any]) -> Iterator[Any]:
        """Implement `Run.batches`."""
        if self._has_epochs:
            if data is not None and data is not self._input.loader and data is not self.fields.get("data"):
                self.refuse(
                    "run.batches(...) has different data than run.epochs(...), whose loader it reads",
                    hint="call run.batches() without arguments. To change an epoch's data, change the loader's "
                    "dataset or sampler",
                )
            return self._give("batches", (self.next_batch() for _ in self._steps_of_epoch()))
        if data is None or batch_size is None:
            self.refuse(
                "run.batches(): expected a dataset and batch_size=...",
                hint="inside `for epoch in run.epochs(loader)` run.batches() needs no arguments",
            )
        if unknown := options.keys() - OPTIONS:
            self.refuse(
                f"run.batches(): unknown option {min(unknown)}",
                hint="known: batch_size, grad_accum, collate. run.steps(per_epoch=...) sets the length of a stream's "
                "epochs; a torch DataLoader has options such as shuffle: pass it to run.steps",
            )
        self.fields |= {"data": data, "batch_size": batch_size, "unit": "samples", **options}
        return self._all_batches()

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Implement `Run.log`."""
        if self._step is None:
            self.refuse("run.log(...) was called outside the loop", hint="call it in a step")
        for name, value in numbers.items():
            if value is None:  # schedulers and optimizers return None before their first step
                self._leave_out(name)
                continue
            try:
                number = read_number(f"run.log({name}=...)", value, self.device)
            except RecipeError as error:
                self.refuse(error.message, error.hint)
            if self._begun is not None and self._begun.taking.log is not None:
                self._begun.taking.log(name, number)
            else:
                self._noted.numbers[name] = number

    def _leave_out(self, name: str) -> None:
        if f"log {name}" not in self._warnings and self._begun is not None:
            warning = f"{find_place()}run.log({name}=None): left out of this step's record"
            self._warnings[f"log {name}"] = warning
            self._training.record.warnings.append(warning)

    def show(self, shown: Mapping[str, str | bytes]) -> None:
        """Implement `Run.show`."""
        if self._step is None:
            self.refuse("run.show(...) was called outside the loop", hint="call it in a step")
        with self.located():
            step = self._step
            self._noted.shown += [
                to_shown(name, value, step.number + 1, step.epoch + 1) for name, value in shown.items()
            ]

    def next_batch(self, *, is_moved: bool = True) -> Any:
        """Return the next batch of the loop's data, on the run's device unless ``is_moved`` is False."""
        if self._begun is None or self._step is None:
            self.refuse("a batch was taken outside the loop", hint="take it in a step")
        if isinstance(self._training.batches, NoBatches):
            self.refuse("step.batch: run.steps(...) has no data", hint="give the loader: for step in run.steps(loader)")
        with self.located():
            self._begun.taking.refuse_whole_batch()
        name, batch = self._training.next_batch(is_moved=is_moved)
        self._noted.names.append(name)
        # accelerate ends an accumulation of gradients at the end of a pass: tell it of this end
        if isinstance(self._input.loader, DataLoaderStateMixin):
            self._input.loader.end_of_dataloader = self._training.batches.is_at_end
        return batch

    def take_shares(self) -> Iterator[Any]:
        """Yield the batches of the present step; see `Step.shares`."""
        with self.located():
            yield from self._inside.taking.take(self._noted.names, self._noted.numbers, self.next_batch)

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Implement `Run.clip_grad_norm_`."""
        if self._begun is None:
            self.refuse("run.clip_grad_norm_(...) was called outside the loop", hint="call it in a step")
        return self._training.ranks.clip(list(parameters), max_norm)

    # ---- inside

    @property
    def _inside(self) -> _Begun:
        assert self._begun is not None, "the loop has begun"
        return self._begun

    @property
    def _training(self) -> Training:
        return self._inside.training

    @property
    def _has_epochs(self) -> bool:
        return "epochs" in self._given

    def _give(self, method: str, iterator: Iterator[T]) -> Iterator[T]:
        self._given[method] = iterator
        return iterator

    def _note_data(self, loader: Any, per_epoch: int | None) -> None:
        source = None
        if loader is not None:
            if "data" in self.fields:
                self.refuse(
                    "run.steps(loader) and run.batches(dataset) both have data", hint="give data to one of them only"
                )
            with self.located():
                source = take_apart(loader, "run.batches(dataset, batch_size=...)")
            if (
                per_epoch is None
                and hasattr(loader, "__len__")
                and not (is_torch_loader(loader) and is_endless(loader))
            ):
                per_epoch = len(loader)
                if per_epoch == 0:
                    self.refuse("the loader yields no batch", hint=NO_BATCH)
        self._input = LoopInput(loader, source, per_epoch)

    def _all_steps(self) -> Iterator[Step]:
        self._open()
        while (step := self._next()) is not None:
            yield step

    def _all_epochs(self) -> Iterator[int]:
        self._open()
        step, training = self._next(), self._training
        if training.record.ends.is_repeating:
            assert step is not None
            yield step.epoch
            if training.record.ends.is_repeating:
                self.refuse(
                    f"the inner loop was left at the end of epoch {step.epoch + 1}, before its iterator has ended",
                    hint="this run resumes before the code at that epoch's end: let run.batches() end the inner loop",
                )
            self._end_late_code()
            step = None
        # Find the last step that the loop has trained, because skipped steps may come between that step and this step.
        last = training.program.skipped.find_outside(step.number) if step is not None else 0
        if step is not None and last:
            epoch = (last - 1) // self._length
            is_inside = epoch == step.epoch
            if is_inside or not training.progress.has_ended_epoch:
                # The code at this epoch's beginning ran before the checkpoint, and will run again now. Take a snapshot,
                # to undo its effects.
                self._undo = self.snapshot()
            if not is_inside and not training.progress.has_ended_epoch:
                # This checkpoint was saved before the code at the epoch's end ran. So run that code first.
                self._is_at_end = True
                yield epoch
                self._is_at_end = False
                self._end_late_code()
        while self._step is not None:
            epoch = self._step.epoch
            yield epoch
            self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Record the epoch's last step, after the code at the epoch's end has run. Begin the next step."""
        step = self._step
        if step is None:
            return
        if step.epoch != epoch:
            self._end_late_code()
            return
        if not self._is_last_of_epoch(step):
            self.refuse(
                f"the inner loop was left in step {step.number + 1}, before the end of epoch {epoch + 1}",
                hint="run.epochs(per_epoch=...) sets the length of an epoch",
            )
        training = self._training
        if not self._has_ended_step:
            self._end_step(step)
        trained, noted = training.record.trained, self._noted
        assert trained is not None
        self._end_code(step)
        trained.ended, self._noted = noted.numbers, Noted()
        trained.samples += noted.names
        for shown in noted.shown:
            training.record.gallery.add(shown)
        training.progress.has_ended_epoch = True
        self._next()

    def _end_late_code(self) -> None:
        """Record the numbers that the code at an epoch's end has logged after the epoch's last step was recorded."""
        step, noted = self._step, self._noted
        assert step is not None
        self._end_code(step)
        self._noted = Noted(noted.names, ended=noted.numbers, shown=noted.shown)

    def _end_code(self, step: Step) -> None:
        """Check the state after the code at an epoch's end."""
        self._share_model()
        self._check_variables()
        # This code may step an optimizer, whose rates aren't those of the next step.
        self._inside.gradients.end_step()

    def _is_last_of_epoch(self, step: Step) -> bool:
        """Return whether the loop trains no further step of this step's epoch; skipped steps may follow."""
        end = (step.epoch + 1) * self._length
        return self._training.program.skipped.find_outside(end) <= step.number + 1

    def _steps_of_epoch(self) -> Iterator[Step]:
        """Yield the present step, and then the later steps of the same epoch.

        After the epoch's last step the loop's own code at the epoch's end runs, and only then `_end_epoch` records the
        step. But if the ranks have to stop at once, record and save the step before that code.
        """
        if self._undo is not None:
            undo, self._undo = self._undo, None
            undo()
            # Drop the numbers and pictures of the repeated code, because they are recorded already.
            self._noted.numbers, self._noted.shown = {}, []
        step = self._step
        if step is None or self._is_at_end:
            return
        if self._has_ended_step:
            self.refuse("the epoch has no further batch", hint="put both loops over the epoch's batches into one")
        epoch = step.epoch
        while step is not None and step.epoch == epoch:
            yield step
            if self._training.record.ends.is_repeating:
                self._drop_step()
            elif self._is_last_of_epoch(step):
                self._end_step(step)
                if not self._saves_first(step):
                    self._training.set_anneals(1)  # the code at the epoch's end and the evaluation have equal values
                    return
            step = self._next()

    def _drop_step(self) -> None:
        """End a step that has no effect, and whose numbers aren't recorded."""
        with self.located():
            self._inside.taking.end_step()
        self._inside.gradients.end_step()
        self._noted, self._has_ended_step = Noted(), True

    def _saves_first(self, step: Step) -> bool:
        """Return whether to save before the code at the epoch's end; at the run's end this is always False."""
        training, end = self._training, (step.epoch + 1) * self._length
        return end < training.total_steps and training.record.ends.saves_first(end)

    def _all_batches(self) -> Iterator[Any]:
        while True:
            yield self.next_batch()

    @property
    def _length(self) -> int:
        return self._training.steps_per_epoch

    def _open(self) -> None:
        """Build the training from the kept objects. Start the generator that executes the orders of the attempt."""
        accelerator = self._wrapping.plugins.owner
        for each in self._objects.values():  # an evaluation may have left an FSDP2 model unsharded
            shard_again(list_fsdp_modules(each) if isinstance(each, torch.nn.Module) else ())
        self.keep(list_checkpointed(accelerator, self._objects))
        if not self._objects:
            self.refuse(
                "the loop begins without run.keep(...): a checkpoint would have no state to restore",
                hint="call run.keep(model=model, optimizer=optimizer, ...) before the loop",
            )
        if self._input.per_epoch is None and "data" not in self.fields:
            self.refuse("the length of an epoch isn't known", hint="set it, as in run.steps(per_epoch=1000)")
        frames = find_frames(self._function)
        with self.located():
            self._wrapping.plugins.check()
            self._wrapping.check_kept(self._objects)
            source = self._input.source
            sources = [self._input.loader, source] if source is not None else []
            is_loader = is_torch_loader(source)
            sorted_objects = sort_kept(self._objects, accelerator, self._objects.left_out)
            kept = Kept(
                **({"data": source} | self.fields | sorted_objects),
                function=self._function,
                originals=[*([] if is_loader else sources), *self._objects.values()],
                own=[
                    *self.own,
                    self.accelerator,
                    accelerator,
                    *self._adopted.objects,
                    *(sources if is_loader else []),
                    *(sorted_objects["extras"][name] for name in OWN_EXTRAS if name in sorted_objects["extras"]),
                ],
                list_variables=self._list_variables,
                steps_per_epoch=self._input.per_epoch,
                constants=read_constants(frames),
                names=[*self._objects],
            )
            holders = Holders(frames, [*self.own, self.accelerator, accelerator, *self._objects.values()])
            self._wrapping.check_trained(kept.trained)
            gradients = kept.extras[GRADIENTS]
            assert isinstance(gradients, Gradients)
            self._wrapping.sharded = list_fsdp_modules(kept.model)
            program = LoopProgram(self.accelerator, kept, self.settings, self._wrapping.data.known)
            program.framework = self.framework
            training = Training(self.config, program)
            training.record.ends.has_code = self._has_epochs
            training.record.check_variables = self._check_variables
            if self._has_epochs:
                training.record.hints += list_hints(frames, self._is_own, self.is_kept)
            training.record.warnings += self._warnings.values()
            taking = Taking(training, gradients)
            self._begun = _Begun(training, taking, self._serve(training), holders, gradients)
        if isinstance(self._input.loader, DataLoaderStateMixin):
            self.accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = True
            self._input.loader.begin()

    def _next(self) -> Step | None:
        """Record the last step, execute orders until an order asks for a step, and return this step.

        At the run's end, return None.

        Raises:
            Stopped: the run stops before its end.
        """
        if self._step is not None and not self._has_ended_step:
            self._end_step(self._step)
        for _ in self._inside.served:
            break
        else:
            self._has_ended, self._step = True, None
            if self._training.progress.step < self._training.total_steps:
                raise Stopped
            return None
        self._step, self._has_ended_step = Step(self, self._training.progress.step, self._length), False
        return self._step

    def _share_model(self) -> None:
        """Shard an FSDP2 model again, and copy the main rank's buffers to all ranks."""
        training = self._training
        if self._wrapping.sharded:
            shard_again(self._wrapping.sharded)
            # FSDP2, unlike DDP, doesn't copy the main rank's buffers to all ranks.
            if not training.ranks.sums_gradients:
                training.ranks.share_saved_buffers(training.recipe.model)

    def _end_step(self, step: Step) -> None:
        training = self._training
        self._share_model()
        try:
            self._inside.taking.end_step()
        except RecipeError as error:
            self.refuse(error.message, error.hint)
        if training.record.is_watched:
            self._check_variables()
        training.progress.has_ended_epoch = False
        accum, takes_whole = training.recipe.grad_accum, not training.ranks.sums_gradients
        if takes_whole and training.recipe.batch_size is not None and len(self._noted.names) != accum:
            self.refuse(
                f"step {step.number + 1} took {len(self._noted.names)} batches, expected {accum}: a resume computes "
                "the position in the data from the number of steps",
                hint=f"take the same number of batches in every step: run.batches(dataset, ..., "
                f"grad_accum={len(self._noted.names) or 1})",
            )
        per_step = training.batches_per_step
        if training.program.skipped and takes_whole and len(self._noted.names) != per_step:
            self.refuse(
                f"step {step.number + 1} took {len(self._noted.names)} batches, but a skipped step draws {per_step}",
                hint="take one step.batch in each step, or set run.batches(dataset, ..., grad_accum=...)",
            )
        lrs = self._inside.gradients.end_step()
        training.record.trained = Unread(
            step.number + 1,
            self._noted.numbers,
            training.lrs if lrs is None else lrs,
            training.anneals,
            self._noted.names,
            ended=self._noted.ended,
        )
        for shown in self._noted.shown:
            training.record.gallery.add(shown)
        self._noted, self._has_ended_step = Noted(), True

    def _check_variables(self) -> None:
        """Check after a step that the loop's variables hold the kept objects; see `Holders`."""
        if self._begun is not None and self._step is not None:
            self._begun.holders.check(self._step.number + 1)

    def close(self) -> None:
        """Close the generator of steps, and end the pass of a loader that accelerate has prepared.

        Call it after an error in the loop, too.
        """
        if self._begun is None:
            return
        if isinstance(self._input.loader, DataLoaderStateMixin):
            self._input.loader.end()
        self._begun.served.close()

    def check_end(self) -> None:
        """Raise RecipeError unless the function has trained the run to its end."""
        function = getattr(self._function, "__code__", None)
        where = f"{function.co_filename}:{function.co_firstlineno}: " if function else ""
        if self._begun is None:
            raise RecipeError(
                f"{where}the recipe's function returned, but trained no step",
                hint="train inside `for step in run.steps(...):`",
            )
        if not self._has_ended:
            done, total = self._training.progress.step, self._training.total_steps
            raise RecipeError(
                f"{where}the loop was left in step {done + 1} of {total}",
                hint="epochs and per_epoch set the last step; a break ends the run too early",
            )

    @property
    def has_begun(self) -> bool:
        """Return whether the loop has asked for its first step."""
        return self._begun is not None

    def _list_variables(self) -> list[Variable]:
        """Return the variables from which the search for forgotten state begins.

        They are the variables of the running functions around the loop, the loader's dataset and collate function, the
        iterators that wrap the run's iterators, and a framework's values.
        """
        frames = find_frames(self._function, outside=OwnLoop._next.__code__)
        parts = ("dataset", "collate_fn") if isinstance(self._input.source, torch.utils.data.DataLoader) else ()
        begun = self._begun
        is_at_end = self._has_epochs and begun is not None and begun.training.progress.step % self._length == 0
        roots = {name: ENDED if is_at_end and name != "epochs" else ITERATOR for name in self._given}
        return [
            *list_carried(frames),
            *(Variable(f"loader.{name}", getattr(self._input.source, name)) for name in parts),
            *list_iterators(frames, self._given, roots),
            *(Variable(name, value, root=FRAMEWORK) for name, value in self._adopted.list_variables()),
        ]
