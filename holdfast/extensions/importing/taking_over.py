"""The import of another program's checkpoint into a training that has just been built, at step 0."""

import contextlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from holdfast.errors import ConfigError, RecipeError, StateError
from holdfast.extensions.importing import generators, optimizers
from holdfast.extensions.importing.foreign import ForeignCheckpoint, check_states, is_scaler, list_names, rename
from holdfast.extensions.importing.reading import read_foreign
from holdfast.extensions.importing.taken import TakenOver
from holdfast.journal import Origin
from holdfast.provenance.model_files import hash_foreign
from holdfast.state import is_sharded
from holdfast.terminal import counted
from holdfast.training import capturing
from holdfast.training.adalora import ALLOCATORS
from holdfast.training.build import Training
from holdfast.training.kept import ACCUMULATION, OWN_EXTRAS, Kept
from holdfast.training.moving import weights
from holdfast.training.moving.weights import SHOWN_NAMES
from holdfast.training.naming import optimizer_state
from holdfast.training.optimizers import parts_of
from holdfast.training.schedulers import waits_for_plateau

GENERATORS = ("python", "numpy", "torch")
# Keys in the states of torch's schedulers whose values may differ between the source and the run, such as counts of
# steps. All other keys are settings. Two schedulers are of one kind if they have the same settings and the same keys of
# OF_KIND.
PROGRESS = {
    "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose", "base_lrs", "best",
    "num_bad_epochs", "cooldown_counter", "mode_worse", "T_cur", "T_i", "lr_lambdas", "_schedulers", "total_steps",
    "_schedule_phases", "_anneal_func_type", "_scale_fn_ref",
}  # fmt: skip
# Keys of PROGRESS that only some kinds of schedulers have. All versions of torch save these keys.
OF_KIND = {"lr_lambdas", "_schedulers"}


# The names that the readers give to schedulers that the source saved in a list, without names.
NUMBERED = re.compile(r"scheduler(_\d+)?")


@runtime_checkable
class MovesIn(Protocol):
    """An object that imports the part of a checkpoint that only a framework understands, such as Lightning's loops.

    Attributes:
        covers: the names of further objects of the run whose states this object imports, too.
    """

    covers: tuple[str, ...]

    def move_in(self, imported: ForeignCheckpoint, step: int, steps_per_epoch: int) -> list[str]:
        """Import the framework's part of a checkpoint. Return the names of the values that the checkpoint lacks."""


def move_in(training: Training, source: str, step: int | None, names: Mapping[str, str]) -> TakenOver:
    """Load another program's checkpoint into a training that has just been built.

    Args:
        source: the path of the checkpoint.
        step: the step from which the run continues; if None, the step in the checkpoint.
        names: new names for the source's objects and weights, by the old names; an empty new name leaves the object
            out.

    Raises:
        ConfigError: the checkpoint can't be read or doesn't fit the training, or its step isn't known.
    """
    if any(map(is_sharded, training.recipe.model.parameters())):
        raise ConfigError(
            'compute.parallel = "fsdp": a checkpoint can be imported only into a model that isn\'t sharded',
            hint="import it with --set compute.parallel=ddp, and continue with "
            "--set 'resume.accept_drift=[\"compute.parallel\"]'",
        )
    imported = rename(read_foreign(Path(source), training.accelerator.process_index), names)
    check_states(imported)
    into = _Into(training, imported)
    into.step = into.choose_step(step)
    into.take_weights()
    into.take_optimizer()
    into.take_schedulers()
    into.take_scaler()
    into.take_extras()
    into.take_progress()
    into.take_data()
    into.take_generators()
    # To hash the source, only the main rank reads it again: the source may be as large as all weights and moments.
    sha256, *_ = training.ranks.gather(hash_foreign(Path(source)) if training.accelerator.is_main_process else "")
    origin = Origin(form=imported.form, source=source, sha256=sha256, step=into.step, lacks=into.lacks)
    return TakenOver(origin=origin, taken=into.taken, notes=into.notes)


def load_foreign(training: Training, source: str, step: int | None, names: Mapping[str, str]) -> dict[str, Any]:
    """Call `move_in`, and return its result as JSON has it."""
    return move_in(training, source, step, names).model_dump(mode="json")


class _Into:
    """The import of a checkpoint's components into a training, one after the other."""

    def __init__(self, training: Training, imported: ForeignCheckpoint) -> None:
        self._training, self._imported = training, imported
        self._order: list[str] = []
        self._used: set[str] = set()
        self.step = 0
        self.taken: list[str] = []
        self.notes: list[str] = []
        self.lacks: list[str] = []

    def choose_step(self, asked: int | None) -> int:
        """Return the step from which the run continues.

        Raises:
            ConfigError: neither the caller nor the source says the step, or the step isn't within the run.
        """
        training, imported = self._training, self._imported
        counted_steps = optimizers.count_steps(imported)
        is_lightnings = imported.batches is not None and any(
            isinstance(each, MovesIn) for each in training.recipe.extras.values()
        )
        told = imported.batches if is_lightnings else imported.step
        if asked is not None and told not in (None, asked):
            self.notes.append(f"the source's record of its step says {told}")
        step = told if asked is None else asked
        if step is None:
            step = counted_steps
            self.notes += (
                [] if step is None else ["the step is the optimizer's own count, because the source has no other count"]
            )
        if step is None:
            epoch = imported.others.get("epoch")
            said = f", only epoch = {epoch}" if isinstance(epoch, int) else ""
            raise ConfigError(
                f"the imported checkpoint doesn't say how many steps it has trained{said}",
                hint=f"name the step with --step N; an epoch has {training.steps_per_epoch} steps here",
            )
        if not is_lightnings and counted_steps is not None and counted_steps != step:
            self.notes.append(f"the optimizer has counted {counted(counted_steps, 'step')} itself")
        if not 1 <= step < training.total_steps:
            end = f"{counted(training.config.epochs, 'epoch')} of {counted(training.steps_per_epoch, 'step')}"
            raise ConfigError(
                f"the run can't continue from step {step}: with this configuration it has {training.total_steps} "
                f"steps ({end})",
                hint="raise epochs" if step else "init_from begins a run with trained weights",
            )
        return step

    def take_weights(self) -> None:
        """Load the model's weights."""
        recipe, modules = self._training.recipe, self._imported.modules
        kept = recipe.modules if isinstance(recipe, Kept) else {}
        own = recipe.model.state_dict()
        others = {name for name in recipe.extras if name in modules}
        found = weights.match_weights(own, {name: each for name, each in modules.items() if name not in others}, kept)
        if self._imported.are_ordered:
            self._order = [*found.weights]
        with capturing.fitted(recipe.model, found.weights):
            self._refuse_unfit(lambda: capturing.load("model", recipe.model, found.weights))
        self._used |= found.used
        self.notes += found.notes
        self.taken.append(f"model: {counted(len(found.weights), 'tensor')}")

    def take_optimizer(self) -> None:
        """Load the optimizers' state."""
        training = self._training
        found = optimizers.match_moments(training, self._imported, self._order)
        if found is None:
            self.lacks.append("optimizer")
            return
        own = optimizer_state(training)
        groups = [mine | theirs for mine, theirs in zip(own["param_groups"], found.groups, strict=True)]
        self._refuse_unfit(
            lambda: capturing.load_optimizer(
                training, {**own, "state": found.state, "param_groups": groups}, are_laid_out=False
            )
        )
        self._used |= found.used
        self.notes += found.paired
        # The notes are about differences in learning rates. With schedulers the differences don't matter, because the
        # schedulers set the rates.
        self.notes += [] if training.schedulers else found.notes
        if found.state and found.stateless:
            shown = ", ".join(found.stateless[:SHOWN_NAMES])
            self.notes.append(f"the source has no state of {counted(len(found.stateless), 'parameter')}: {shown}")
        kinds = "+".join(type(part).__name__ for part in parts_of(training.recipe.optimizer))
        self.taken.append(f"optimizer: {kinds}, {counted(len(found.state), 'parameter')}, matched {found.how}")

    def take_schedulers(self) -> None:
        """Load the schedulers' states.

        If the source has no scheduler, step a recipe's schedulers up to the run's step. The schedulers of a loop, and a
        ``ReduceLROnPlateau``, then keep the state that they were built with, and the import records them as lacking.
        """
        training, sources = self._training, self._imported.schedulers
        own = training.schedulers
        if not own:
            return
        if not sources:
            if training.recipe.has_own_loop or any(map(waits_for_plateau, own)):
                self.lacks.append("scheduler")
            else:
                self._step_schedulers()
            return
        if len(own) != len(sources):
            raise ConfigError(
                f"the run has {counted(len(own), 'scheduler')}, but the source has {len(sources)}: "
                f"{', '.join(sources)}",
                hint="--map NAME= leaves a scheduler of the source out",
            )
        for name, scheduler in self._pair_schedulers():
            self._take_scheduler(scheduler, name, sources[name])
            self._used.add(name)

    def _pair_schedulers(self) -> list[tuple[str, Any]]:
        """Return pairs: the name of a scheduler in the source, and the run's scheduler that takes its state.

        Raises:
            ConfigError: a scheduler's name isn't in the source, and none or several of the source's schedulers have the
                same settings.
        """
        own, sources = [*self._training.schedulers], self._imported.schedulers
        if len(own) == 1:
            return [(next(iter(sources)), own[0])]
        recipe = self._training.recipe
        names = recipe.scheduler_names if isinstance(recipe, Kept) else self._training.schedulers.names
        if {*names} == {*sources}:
            return list(zip(names, own, strict=True))
        # The source saved its schedulers in a list, as accelerate and Lightning do.
        if all(map(NUMBERED.fullmatch, sources)):
            in_order = sorted(sources, key=lambda each: int(each.rpartition("_")[2]) if "_" in each else 0)
            shown = ", ".join(f"{each} is {name}" for each, name in zip(in_order, names, strict=True))
            self.notes.append(f"the source's schedulers have no names, and are taken in their order: {shown}")
            return list(zip(in_order, own, strict=True))
        pairs, left = [], [key for key in sources if key not in names]
        for name, scheduler in zip(names, own, strict=True):
            if name in sources:
                pairs.append((name, scheduler))
                continue
            kind = _find_kind(scheduler.state_dict())
            fitting = [key for key in left if _find_kind(sources[key]) == kind]
            if len(fitting) != 1:
                known = fitting or left
                raise ConfigError(
                    f"can't tell which of the source's schedulers ({', '.join(sorted(known))}) is the run's scheduler "
                    f"{name}",
                    hint=f"--map {known[0]}={name}; the run's schedulers are {', '.join(names)}",
                )
            self.notes.append(f"scheduler {name}: {fitting[0]} of the source, by its settings")
            left.remove(fitting[0])
            pairs.append((fitting[0], scheduler))
        return pairs

    def _take_scheduler(self, scheduler: Any, name: str, saved: Mapping[str, Any]) -> None:
        built = scheduler.state_dict()
        own, theirs = _find_kind(built), _find_kind(saved)
        lost, others = sorted(own - theirs), sorted(theirs - own)
        if lost or others:
            raise ConfigError(
                f"the source's {name} is the state of a different scheduler than the run's "
                f"{type(scheduler).__name__}: it has {', '.join(others) or 'nothing else'}, and lacks "
                f"{', '.join(lost) or 'nothing'}",
                hint=f"build the scheduler that the source has, or leave the source's state out: --map {name}=",
            )
        rates = [group["lr"] for group in self._training.optimizer.param_groups]
        if len(saved.get("base_lrs", rates)) != len(built.get("base_lrs", rates)):
            raise ConfigError(
                f"the source's {name} sets the learning rates of {counted(len(saved['base_lrs']), 'parameter group')}, "
                f"but the run's scheduler sets those of {counted(len(built['base_lrs']), 'parameter group')}",
                hint=f"build the source's optimizer, or leave the scheduler out: --map {name}=",
            )
        for key in sorted(built.keys() - PROGRESS):
            if key in saved and built[key] != saved[key] and not isinstance(built[key], Tensor):
                self.notes.append(f"{name}: {key} = {saved[key]!r} from the source replaces {built[key]!r}")
        self._refuse_unfit(lambda: capturing.load(f"scheduler {name}", scheduler, dict(saved)))
        for group, rate in zip(self._training.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.taken.append(f"scheduler: {type(scheduler).__name__} at step {saved.get('last_epoch')}")

    def _step_schedulers(self) -> None:
        training = self._training
        rates = [group["lr"] for group in training.optimizer.param_groups]
        with warnings.catch_warnings():
            # suppress torch's warning about a scheduler that steps before its optimizer
            warnings.simplefilter("ignore")
            for _ in range(self.step):
                training.schedulers.step()
        if "optimizer" not in self.lacks:
            for group, rate in zip(training.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self.notes.append(f"scheduler: the source has none, so the run's scheduler was stepped {self.step} times")

    def take_scaler(self) -> None:
        """Load the state of the gradient scaler."""
        scaler, others = self._training.accelerator.scaler, self._imported.others
        if scaler is None:
            return
        name = next((name for name, each in others.items() if is_scaler(each)), None)
        if name is None:
            self.lacks.append("scaler")
        else:
            self._refuse_unfit(lambda: capturing.load("scaler", scaler, others.pop(name)))
            self.taken.append("scaler")

    def take_extras(self) -> None:
        """Load the other objects that the run keeps, by their names."""
        imported = self._imported
        found = imported.others | {name: each for name, each in imported.modules.items() if name not in self._used}
        extras = self._training.recipe.extras
        covered = ({*OWN_EXTRAS} - {ALLOCATORS}).union(*(getattr(each, "covers", ()) for each in extras.values()))
        for name, extra in extras.items():
            if isinstance(extra, MovesIn):
                self.lacks += extra.move_in(imported, self.step, self._training.steps_per_epoch)
                self.taken.append(name)
            elif name in found:
                self._take_extra(name, extra, found[name])
            elif (state := self._take_generator(name)) is not None:
                self._take_extra(name, extra, state)
            elif name not in covered and extra.state_dict():
                self.lacks.append(name)
        unused = sorted({*filter(None, list_names(imported))} - {*extras, *imported.generators} - self._used)
        self.notes += [f"not imported: {', '.join(unused)}"] if unused else []

    def _take_generator(self, name: str) -> Any:
        """Remove the state of a generator that the loop keeps by this name from those of the source, and return it.

        Return None if the source has no such state.
        """
        held = self._imported.generators
        for own in (held, *(each for each in held.values() if isinstance(each, dict))):
            if name in own:
                return own.pop(name)
        return None

    def _take_extra(self, name: str, extra: Any, saved: Any) -> None:
        self._used.add(name)
        state = saved
        with contextlib.suppress(AttributeError):
            # If the loop keeps a value without a `state_dict`, such as a dict or a tensor, the extra's state is
            # {"value": ...}. The source has saved the value itself.
            if {*extra.state_dict()} == {"value"}:
                state = {"value": saved}
        self._refuse_unfit(lambda: capturing.load(f"extra {name}", extra, state))
        if name != ACCUMULATION:
            self.taken.append(name)

    def take_progress(self) -> None:
        """Set the training's number of completed steps."""
        self._training.progress.step = self.step

    def take_data(self) -> None:
        """Move the data to its position after `step` steps."""
        training = self._training
        training.begin_data()
        if hasattr(training.batches, "move_to"):
            note = training.batches.move_to(self.step, training.steps_per_epoch)
            self.lacks += [note] if note else []

    def take_generators(self) -> None:
        """Load the states of the random generators.

        Call it last, because the other imports may draw from the generators.
        """
        training, named = self._training, self._imported.generators
        states = [generators.list_states(name, value) for name, value in named.items()]
        found, others = generators.choose_own({name: state for each in states for name, state in each.items()})
        if training.ranks.has_common_state:
            self.lacks.append("generators of virtual ranks")
            return
        own = training.generators.state_dict()
        known = [name for name in GENERATORS if name in found]
        self.lacks += [f"generator of {name}" for name in GENERATORS if name not in found]
        if own["cuda"]:
            known += ["cuda"] if "cuda" in found else []
            self.lacks += [] if "cuda" in found else ["generator of cuda"]
        training.generators.load_state_dict(own | {name: found[name] for name in known})
        self.taken += [f"generators: {', '.join(known)}"] if known else []
        self.notes += [f"not imported: generators {', '.join(others)}"] if others else []

    def _refuse_unfit(self, load: Any) -> None:
        try:
            load()
        except (StateError, RecipeError) as error:
            message = " ".join(error.message.replace("the saved ", "the source's ", 1).split())
            raise ConfigError(message, hint="--map NAME= leaves an object of the source out") from None


def _find_kind(state: Mapping[str, Any]) -> set[str]:
    """Return the keys of a scheduler's state that show the scheduler's kind."""
    return {*state} - (PROGRESS - OF_KIND)
