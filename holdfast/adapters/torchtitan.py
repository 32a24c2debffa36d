"""The adapter for torchtitan: torchtitan's own Trainer and loop train the steps of a run.

``train(run, config)`` replaces ``config.build().train()``. A step of the run is a step of torchtitan. Between two steps
torchtitan calls ``should_continue_training``; by then the last step's logs and validation are finished.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from holdfast.adapters.torchtitan_config import be_patient_in, check_config, divide_steps
from holdfast.errors import RecipeError
from holdfast.state import is_plain
from holdfast.terminal.distribution import spell_install
from holdfast.training.own_loop.loop import Step, Stopped
from holdfast.training.own_loop.run import Run, loop_of

try:
    import torchtitan

    if not torchtitan.__version__.startswith("0.3."):  # the adapter uses private attributes of version 0.3
        raise ImportError(f"found {torchtitan.__version__}")
    from torchtitan.tools.utils import device_type, get_local_device
    from torchtitan.trainer import Trainer
except ImportError as error:
    message = f"holdfast.adapters.torchtitan needs torchtitan 0.3: {error}; {spell_install('torchtitan')}"
    raise ImportError(message, name="torchtitan") from None

from holdfast.adapters.torchtitan_parts import HeldBatches, LoaderPosition, Recorder, TrainState, merged

__all__ = ["train"]


def train(run: Run, config: Any) -> Any:
    """Train as ``config.build().train()`` does, in steps of a run.

    The run saves the model, the optimizers, the schedulers, the Trainer's own ``state_dict`` and the position in the
    data. torchtitan's config applies as usual. ``training.steps`` is the run's length, and must be a multiple of
    ``epochs`` in the run's configuration; ``parallelism`` decides how the ranks train. Before the call, register
    everything else that a step depends on with ``run.keep(name=...)``.

    Args:
        config: a ``Trainer.Config`` of torchtitan, such as ``llama3_debugmodel()``, or the ``Config`` of a subclass of
            ``Trainer``.

    Returns: the Trainer, whose model has the weights of the run's last step.

    Raises:
        RecipeError: a run with this config can't resume exactly, or the config contradicts the run's configuration.
        Stopped: the run stops before its end.
    """
    loop_of(run).framework = "torchtitan's Trainer"
    with loop_of(run).located():
        if not isinstance(config, Trainer.Config):
            found = f"{type(config).__module__}.{type(config).__qualname__}"
            raise RecipeError(
                f"train(run, config): expected a torchtitan Trainer.Config, found a {found}",
                hint="pass what a function in torchtitan's config_registry returns, without calling .build()",
            )
        check_config(run.config.compute, run.world_size, config)
        length = divide_steps(run.config.epochs, config.training.steps)
        _join_group(run)
    # torchtitan also makes this call, but only if it creates the process group itself. The device mesh is set only in
    # the thread of the forward pass, so the backward pass has to run in that thread, too.
    with torch.autograd.set_multithreading_enabled(False), contextlib.closing(be_patient_in(config).build()) as trainer:
        with loop_of(run).located():
            held = _Held(run, trainer, length)
        held.train()
    return trainer


def _join_group(run: Run) -> None:
    """Create the process group that torchtitan needs even for one rank. With several ranks it exists already.

    Raises:
        RecipeError: torchtitan would train on a different device than the run.
    """
    # don't destroy the group, because the parameters of the Trainer's model need it
    if not distributed.is_initialized():
        os.environ.setdefault("LOCAL_RANK", str(run.device.index or 0))
        backend = "nccl" if run.device.type == "cuda" else "gloo"
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    found = get_local_device() if device_type == run.device.type else torch.device(device_type)
    if (found.type, found.index or 0) != (run.device.type, run.device.index or 0):
        raise RecipeError(
            f"torchtitan trains on {found}, but compute.device selects {run.device}",
            hint="leave compute.device out: torchtitan always trains on the machine's accelerator",
        )


class _Held:
    """A run's Trainer, and the boundary between two of its steps."""

    def __init__(self, run: Run, trainer: Any, length: int) -> None:
        """
        Args:
            length: the number of steps of an epoch.
        """
        self._run, self._trainer, self._length = run, trainer, length
        self._goes_on = trainer.should_continue_training
        self._position = LoaderPosition(trainer.dataloader)
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._has_begun = False

    def train(self) -> None:
        """Train to the run's end.

        Raises:
            RecipeError: the Trainer has ended before the run's end.
        """
        trainer, loop = self._trainer, loop_of(self._run)
        own = [self, trainer, *(each for each in vars(trainer).values() if not is_plain(each))]
        loop.adopt(own, self._list_unsaved)
        trainer.dataloader = HeldBatches(trainer.dataloader, loop)
        trainer.metrics_processor.logger = Recorder(trainer.metrics_processor.logger, self._run)
        trainer.should_continue_training = self._await_step
        with merged(trainer.model_parts[0]):
            self._begin()
            trainer.train()
        if self._step is not None:
            loop.refuse(
                f"the Trainer ended after step {self._step.number}, before the run's last step",
                hint="raise training.steps in torchtitan's config; a proof's --steps may not exceed it",
            )

    def _begin(self) -> None:
        """Register the state with the run, restore the state, and begin the first step."""
        run, trainer = self._run, self._trainer
        if trainer.parallel_dims.tp > 1:
            run.data_parallel(trainer.parallel_dims.get_optional_mesh("batch", include_singleton_axes=True))
        run.keep(
            model=trainer.model_parts[0],
            trainer=TrainState(trainer),
            **_number("optimizer", trainer.optimizers),
            **_number("lr_scheduler", trainer.lr_schedulers),
        )
        self._steps = run.steps(self._position, per_epoch=self._length)
        self._step = next(self._steps, None)

    def _await_step(self) -> bool:
        """Record the last step, and wait for the next step. Return whether there is a next step."""
        if self._has_begun:
            self._step = next(self._steps, None)
        self._has_begun = True
        goes_on = bool(self._goes_on())
        if goes_on and self._step is None:
            raise Stopped  # a proof trains fewer steps than the Trainer, so end the Trainer's loop here
        return goes_on

    def _list_unsaved(self) -> list[tuple[str, Any]]:
        """Return, by name, the plain attributes (see `is_plain`) that a user's subclass has added to the Trainer."""
        known = {*Trainer.__annotations__, *self._trainer.state_dict()}
        found = {name: each for name, each in vars(self._trainer).items() if name not in known}
        return [(f"trainer.{name}", each) for name, each in found.items() if is_plain(each)]


def _number(name: str, among: Any) -> dict[str, Any]:
    found = [*among]
    return {name if len(found) == 1 else f"{name}_{index}": each for index, each in enumerate(found)}
