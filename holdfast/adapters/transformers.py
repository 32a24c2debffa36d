"""The adapter for Hugging Face's `Trainer`, and for TRL's trainers that inherit it: their loop trains a run's steps.

Between two steps the Trainer calls ``get_batch_samples``. By then the last step's logs and evaluation are finished, and
no batch of the next step is loaded yet.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from holdfast.adapters.trainer_arguments import check_arguments, choose_length, transformers
from holdfast.errors import RecipeError
from holdfast.state import Attributes, is_plain
from holdfast.training.devices import required_of_ddp
from holdfast.training.own_loop.loop import Step, Stopped
from holdfast.training.own_loop.run import Run, loop_of

# The suffixes of the names under which the Trainer logs times and speeds.
MEASURED = ("_runtime", "_per_second")
# Numbers in the Trainer's logs that aren't recorded, because the run records them itself or they follow from the step.
RECORDED = {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos"}
# Callbacks whose attributes belong to the process and not to the run's state, for example a progress bar or a
# connection.
STATELESS = (transformers.ProgressCallback, transformers.PrinterCallback, transformers.DefaultFlowCallback)
STATELESS_MODULES = ("transformers.integrations.", "transformers.utils.notebook")


def train(run: Run, trainer: Any, *, measured: Collection[str] = (), **options: Any) -> Any:
    """Train a Trainer to the run's end, in place of ``trainer.train()``.

    The run saves the model, the optimizer, the scheduler, ``trainer.state``, the position in the data, and the plain
    attributes of the Trainer and its callbacks: numbers, texts, tensors and containers of these (see `Attributes`).
    Before the call, register everything else that a step depends on with ``run.keep(name=...)``.

    Args:
        trainer: a `transformers.Trainer` whose ``train`` hasn't been called.
        measured: names of attributes, and keys of dicts in attributes, whose values differ between equal trainings,
            such as times and paths. The run doesn't save these values.
        options: further arguments of ``trainer.train``.

    Returns: the result of ``trainer.train``.

    Raises:
        RecipeError: the run can't resume exactly with the Trainer's arguments.
        Stopped: the run stops before its end.
    """
    loop_of(run).framework = "a Hugging Face Trainer"
    with loop_of(run).located():
        check_arguments(run, trainer, options)
    for name, value in required_of_ddp(run.world_size).items():
        setattr(trainer.accelerator.ddp_handler, name, value)
    held = _Held(run, trainer, lambda name: name.endswith(MEASURED) or name in measured)
    reporter = _Reporter(held)
    own_class = type(trainer)
    names = {name: getattr(own_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    trainer.__class__ = type(own_class.__name__, (_HeldTrainer, own_class), names)
    trainer._held = held
    trainer.add_callback(reporter)
    try:
        with _skipping():
            return trainer.train(**options)
    except _Complete:
        return transformers.trainer_utils.TrainOutput(trainer.state.global_step, 0.0, {})
    finally:
        trainer.remove_callback(reporter)
        del trainer._held
        trainer.__class__ = own_class


def _has_state(callback: Any) -> bool:
    """Return whether a callback's attributes are part of a run's state."""
    kind = type(callback)
    is_reporter = kind is _Reporter
    return not (is_reporter or kind in STATELESS or kind.__module__.startswith(STATELESS_MODULES))


# ---- the callback between two steps, where the Trainer's loop calls Holdfast


class _Complete(Exception):
    """Ends a Trainer's loop before its first step, because the run is complete."""


class _Held:
    """The link between a run and its Trainer, with the code that runs between two steps."""

    def __init__(self, run: Run, trainer: Any, is_measured: Any) -> None:
        self.run, self._trainer, self._is_measured = run, trainer, is_measured
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._undo: Any = None
        self._extras = {"trainer": Attributes(lambda: trainer, is_measured), "callbacks": self._describe_callbacks()}
        self.loader: Any = None
        self.prepared: Any = None
        self._loss: Any = None
        self._has_begun = False

    @property
    def is_in_step(self) -> bool:
        """Return whether a step is in progress, so that numbers may be recorded."""
        return self._step is not None

    def is_recorded(self, name: str) -> bool:
        """Return whether a number in the Trainer's logs is recorded with the run's step."""
        return name not in RECORDED and not self._is_measured(name)

    def _describe_callbacks(self) -> dict[str, Attributes]:
        found: dict[str, Attributes] = {}
        for each in filter(_has_state, self._trainer.callback_handler.callbacks):
            kind = type(each)
            name = kind.__name__ if kind.__name__ not in found else f"{kind.__name__} {len(found)}"
            found[name] = Attributes(lambda each=each: each, self._is_measured)  # type: ignore[misc]
        return found

    def begin(self, updates: int, total: int) -> int:
        """Restore the run's state into the Trainer and its callbacks. Return the number of completed steps.

        Raises:
            _Complete: all steps of the run are completed.
        """
        trainer, scaler = self._trainer, self._trainer.accelerator.scaler
        state = _TrainerState(trainer, self._is_measured)
        extras: dict[str, Any] = self._extras | {"trainer_state": state}
        extras |= {"grad_scaler": scaler} if scaler else {}
        self.run.keep(model=trainer.model, optimizer=trainer.optimizer, lr_scheduler=trainer.lr_scheduler, **extras)
        with loop_of(self.run).located():
            length = choose_length(self.run, updates, total)
        self._steps = self.run.steps(self.loader.shard, per_epoch=length)
        self._step = next(self._steps, None)
        if self._step is None:
            raise _Complete
        if self._step.number:
            self._undo = loop_of(self.run).snapshot()
        return self._step.number

    @property
    def has_resumed(self) -> bool:
        """Return whether the run has resumed.

        If so, code before the first step has run again, and its effects must be undone.
        """
        return self._undo is not None

    def await_step(self) -> None:
        """Record the last step, and begin the next.

        The first call records nothing, but undoes the effects of code that ran again.
        """
        if not self._has_begun:
            self._has_begun = True
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()
            return
        self._record_loss()
        self._step = next(self._steps, None)
        if self._step is None:
            raise Stopped  # a proof trains fewer steps than the Trainer, so leave the Trainer's loop here

    def end(self) -> None:
        """Record the last step of the Trainer.

        Raises:
            RecipeError: the Trainer's last step isn't the run's last step.
        """
        self._record_loss()
        self._step = next(self._steps, None)
        if self._step is not None:
            with loop_of(self.run).located():
                raise RecipeError(
                    f"the Trainer ended after step {self._step.number}, before the run's last step",
                    hint="remove the callback that sets control.should_training_stop: a run can't end early",
                )

    def _record_loss(self) -> None:
        if self._loss is not None:
            self.run.log(loss=self._loss)
        self._loss = None

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-batch to the step's loss, as the Trainer does."""
        self._loss = loss.float() if self._loss is None else self._loss + loss.float()

    def batches(self) -> Iterator[Any]:
        """Yield the run's next batches, endlessly."""
        while True:
            yield loop_of(self.run).next_batch()


# The attributes of a Trainer's state that an import loads from the Trainer's checkpoint. The arguments determine all
# other attributes.
SAVED = (
    "global_step", "epoch", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos",
    "num_input_tokens_seen",
)  # fmt: skip


class _TrainerState(Attributes):
    """The attributes of ``trainer.state`` as a state. An import loads them from a Trainer's checkpoint."""

    covers = ("trainer", "callbacks")

    def __init__(self, trainer: Any, is_measured: Any) -> None:
        super().__init__(lambda: trainer.state, is_measured)
        # Keep the trainer in a function and not in an attribute, because the search for forgotten state counts all
        # objects in the attributes of a kept object as saved.
        self._find_trainer: Callable[[], Any] = lambda: trainer

    def move_in(self, checkpoint: Any, step: int, steps_per_epoch: int) -> list[str]:
        """Load the state in a Trainer's checkpoint. Return the names of the state that the checkpoint lacks."""
        trainer, saved = self._find_trainer(), checkpoint.framework.get("trainer_state")
        trainer.state.global_step = trainer._globalstep_last_logged = step
        trainer.state.epoch = step / steps_per_epoch
        if saved is None:
            return ["the Trainer's state"]
        for name in SAVED:
            if name in saved:
                setattr(trainer.state, name, saved[name])
        logged = max((each.get("step", 0) for each in saved.get("log_history", []) if "loss" in each), default=0)
        lost = [] if logged == step else [f"the sum of losses since step {logged}, for the Trainer's next log"]
        return lost + self._take_callbacks(saved.get("stateful_callbacks", {}))

    def _take_callbacks(self, saved: dict[str, Any]) -> list[str]:
        """Load the callbacks' attributes from a Trainer's checkpoint.

        Return the callbacks that the checkpoint lacks.
        """
        lost = []
        for callback in filter(_has_state, self._find_trainer().callback_handler.callbacks):
            found = saved.get(type(callback).__name__)
            if isinstance(found, dict):
                vars(callback).update(found.get("attributes", {}))
            elif any(is_plain(each) for each in vars(callback).values()):
                lost.append(f"the callback {type(callback).__name__}")
        return lost


class _Loader:
    """The loader that the Trainer iterates over. Its batches come from the run.

    Attributes:
        shard: the Trainer's own loader, which accelerate has prepared.
    """

    def __init__(self, held: _Held, shard: Any) -> None:
        self._held, self.shard = held, shard
        # whether the run has resumed inside an epoch, so that the epoch's order of samples is already drawn
        self.is_inside = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shard, name)

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[Any]:
        return self._held.batches()

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler the epoch, unless the epoch's order of samples is drawn already."""
        if self.is_inside:
            self.is_inside = False
        else:
            self.shard.set_epoch(epoch)


@contextlib.contextmanager
def _skipping() -> Iterator[None]:
    """Inside the block, keep the Trainer from skipping batches, because the run itself continues at the right batch."""
    usual = transformers.trainer.skip_first_batches
    transformers.trainer.skip_first_batches = lambda loader, *others, **options: loader
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = usual


class _HeldTrainer:
    """The methods that replace a Trainer's methods while a run trains. Most call the replaced method, too."""

    _held: _Held

    def get_train_dataloader(self) -> Any:
        self._held.loader = _Loader(self._held, super().get_train_dataloader())  # type: ignore[misc]
        return self._held.loader

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *others: Any, **options: Any
    ) -> tuple[int, int]:
        # Create the optimizer and the scheduler here, because they have to be restored before the first step is known.
        trainer: Any = super()
        trainer._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, None)
        held = self._held
        held.prepared = trainer._prepare_for_training(max_steps, held.loader, None)
        done = held.begin(num_update_steps_per_epoch, max_steps)
        epoch, within = divmod(done, num_update_steps_per_epoch)
        held.loader.is_inside = within > 0
        return epoch, within * self.args.gradient_accumulation_steps  # type: ignore[attr-defined]

    def _prepare_for_training(self, *arguments: Any, **options: Any) -> Any:
        prepared, self._held.prepared = self._held.prepared, None
        return prepared

    def _run_epoch(self, **arguments: Any) -> Any:
        if self._held.has_resumed:
            arguments["resume_from_checkpoint"] = "the run's own checkpoint"
        return super()._run_epoch(**arguments)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Do nothing, because the run restores the random generators."""

    def _evaluate(self, *arguments: Any, **options: Any) -> Any:
        if self._held.has_resumed:  # skip args.eval_on_start: that evaluation ran before the checkpoint
            return {}
        return super()._evaluate(*arguments, **options)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *others: Any) -> Any:
        self._held.await_step()
        return super().get_batch_samples(self._held.batches(), num_batches, *others)  # type: ignore[misc]

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        loss = super().training_step(*arguments, **options)  # type: ignore[misc]
        self._held.add_loss(loss)
        return loss

    def _get_grad_norm(self, *arguments: Any, **options: Any) -> Any:
        norm = super()._get_grad_norm(*arguments, **options)  # type: ignore[misc]
        if norm is not None:
            self._held.run.log(grad_norm=norm)
        return norm

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        self._held.end()
        return super()._finalize_training(*arguments, **options)  # type: ignore[misc]


class _Reporter(transformers.TrainerCallback):
    """Records the numbers of the Trainer's logs with the step of the run."""

    def __init__(self, held: _Held) -> None:
        self._held = held

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if self._held.is_in_step:
            numbers = {name: each for name, each in logs.items() if isinstance(each, int | float)}
            self._held.run.log(**{name: each for name, each in numbers.items() if self._held.is_recorded(name)})
