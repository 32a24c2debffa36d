"""Lightning's fit loop, changed so that it calls the run between two steps.

The run is opened before the first batch, after all ``on_train_start`` hooks. If the run resumes, opening it restores
all state in place. Lightning then continues at its request for a batch, and doesn't call ``on_train_epoch_start`` again
for the epoch that it continues.

This module and `lightning_state` use private attributes of Lightning 2.6; tests/holdfast/adapters lists all of them.
"""

import logging
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.data_connector import (
    _DataLoaderSource,
    _parse_num_batches,
    _request_dataloader,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from holdfast.adapters.lightning_state import Checkpointed, Counters, TrainerState, UnsavedAttributes
from holdfast.checkpoint import shorten
from holdfast.training.build import cut_epoch
from holdfast.training.own_loop.loop import Step
from holdfast.training.own_loop.run import Run, loop_of
from holdfast.training.sharded.model import SHOWN_NAMES, list_fsdp_modules, list_whole, shard_again

log = logging.getLogger(__name__)


class Outputs(pl.Callback):
    """A callback that collects the numbers that a step has logged. Lightning must call it after all other callbacks."""

    def __init__(self) -> None:
        self.numbers: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Store the loss and the numbers that the step has logged."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        numbers = ({} if loss is None else {"loss": loss}) | trainer._results.metrics(on_step=True)["callback"]
        self.numbers = {name: each for name, each in numbers.items() if each.numel() == 1}


class Boundary:
    """The boundary between two steps of a run, at which Lightning asks for a batch.

    Attributes:
        run: the run.
        length: the number of steps of an epoch in this process; 0 until `hold` is called with the loader.
    """

    def __init__(self, run: Run, trainer: pl.Trainer, outputs: Outputs) -> None:
        self.run, self.length = run, 0
        self._trainer, self._outputs = trainer, outputs
        self._counters = Counters(trainer)
        self._steps: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._known: dict[str, Tensor] = {}
        self._is_open = False
        # whether `open` has begun the first step, and Lightning hasn't taken that step's batch yet
        self._is_first = False
        # the counters of Lightning's loops that a resume has restored, until the first batch is requested; else None
        self._resumed: dict[str, Any] | None = None

    def hold(self, loader: Any) -> "HeldLoader":
        """Give a train loader to the run. Return the `HeldLoader` over which Lightning iterates instead.

        Raises:
            RecipeError: there are several loaders, the loader has no length, or its position can't be restored.
        """
        if isinstance(loader, CombinedLoader | list | tuple | dict):
            loop_of(self.run).refuse(
                "train_dataloader: a resume can't restore the position of several loaders",
                hint="use one DataLoader over a dataset that joins the others, such as torch.utils.data.StackDataset",
            )
        if self.run.world_size > 1 and not isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loop_of(self.run).refuse(
                "train_dataloader: all ranks would get the same batches",
                hint="set Trainer(use_distributed_sampler=True), or give the DataLoader a DistributedSampler",
            )
        limit = self._trainer.limit_train_batches
        length = sized_len(loader)
        if length is None:
            loop_of(self.run).refuse(
                "train_dataloader: the loader has no length (len), so the length of an epoch is unknown",
                hint="use a DataLoader over a map-style dataset",
            )
        own = int(_parse_num_batches(RunningStage.TRAINING, length, limit))
        if not own:
            loop_of(self.run).refuse(
                "train_dataloader: an epoch has no batch",
                hint="give more data, a smaller batch_size, or limit_train_batches=1.0",
            )
        self.length = cut_epoch(own)
        self._steps = self.run.steps(loader, per_epoch=own)
        return HeldLoader(loader, self)

    def open(self) -> bool:
        """Register the state with the run, and begin the first step. Further calls do nothing, and return False.

        Returns:
            whether the run resumes in this call, after Lightning has begun the epoch. A run that was complete, and has
            been extended, resumes before that: its last checkpoint was saved when Lightning had ended its loop.

        Raises:
            StopIteration: the run has no further step.
            Stopped: the run stops before its end.
        """
        if self._is_open:
            return False
        self._is_open = True
        self._keep()
        self._step = next(self._steps)
        self._is_first, self._known = True, {**self._trainer._logger_connector._callback_metrics}
        is_at_end = (
            self._step.number % self.length == 0 and self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        )
        if self._step.number and not is_at_end:
            self._resumed = self._counters.state_dict()
        return self._resumed is not None

    def _keep(self) -> None:
        trainer = self._trainer
        # Lightning's validation before the training (num_sanity_val_steps) has left the outermost module unsharded.
        shard_again(list_fsdp_modules(trainer.lightning_module))
        if isinstance(trainer.strategy, ModelParallelStrategy) and (whole := list_whole(trainer.lightning_module)):
            loop_of(self.run).refuse(
                f"configure_model has left {shorten(whole, SHOWN_NAMES)} unsharded: nothing would average the gradient",
                hint='call fully_shard(self.net, mesh=self.device_mesh["data_parallel"]) for each module of a step',
            )
        checkpointed, state = Checkpointed(trainer), TrainerState(trainer)
        optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
        self.run.keep(
            module=trainer.lightning_module,
            **{_number("optimizer", index, optimizers): each for index, each in enumerate(optimizers)},
            **{_number("scheduler", index, configs): each.scheduler for index, each in enumerate(configs)},
            precision=trainer.precision_plugin,
            callbacks=checkpointed,
            loops=self._counters,
            trainer=state,
        )
        own = [self, checkpointed, state, self._counters, trainer, *trainer.callbacks, *trainer.loggers]
        own += [*trainer.strategy._lightning_optimizers, *([trainer.datamodule] if trainer.datamodule else [])]
        loop_of(self.run).adopt(own, UnsavedAttributes(self.run, trainer).list_variables)

    def next_batch(self) -> Any:
        """Record the last step, and return the next batch.

        Raises:
            RecipeError: Lightning has left an epoch before its end.
            Stopped: the run stops before its end.
        """
        loop = self._trainer.fit_loop
        if self._is_first:
            self._is_first = False
            # restore the counters now, because Lightning resets them when it begins its loop over the epoch
            if self._resumed is not None:
                self._counters.load_state_dict(self._resumed)
                loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
                self._resumed = None
        else:
            self._log()
            self._step = next(self._steps)
        assert self._step is not None
        done = loop.epoch_loop.batch_progress.current.ready  # how many batches this epoch has had so far
        if done != self._step.number % self.length:
            loop_of(self.run).refuse(
                f"Lightning left an epoch of {self.length} batches early, in step {self._step.number}",
                hint="on_train_batch_start may not return -1; limit_train_batches sets the length of an epoch",
            )
        if not done:
            loop_of(self.run).end_pass()
        # leave the batch on the CPU, because Lightning moves it to the device and calls its hooks for that
        return loop_of(self.run).next_batch(is_moved=False)

    def finish(self) -> None:
        """Record the last step, and end the run.

        Raises:
            RecipeError: Lightning has left its loop before the run's end.
            Stopped: the run stops before its end.
        """
        if self._step is None:  # the run was already complete
            return
        done, total = self._step.number + 1, self.run.config.epochs * self.length
        if done < total:
            self._refuse_end(done, total)
        self._log()
        for step in self._steps:
            raise AssertionError(f"step {step.number} follows the run's last step")
        self._step = None

    def _refuse_end(self, done: int, total: int) -> None:
        """Refuse an early stop, such as EarlyStopping's, because a run is complete only after all its steps."""
        reasons = [getattr(each, "stopping_reason_message", None) for each in self._trainer.callbacks]
        reason = next((f": {each}" for each in reasons if each), "")
        epochs, rest = divmod(done, self.length)
        loop_of(self.run).refuse(
            f"the Trainer stopped early, after step {done} of {total}{reason}",
            hint="a run can end only with an epoch, as with EarlyStopping(check_on_train_epoch_end=True)"
            if rest
            else f"set epochs = {epochs} in the configuration to end the run after this step",
        )

    def _log(self) -> None:
        """Log the last step's numbers, and the numbers that Lightning has logged since then, such as a validation's."""
        logged, numbers = self._trainer._logger_connector._callback_metrics, self._outputs.numbers
        later = {
            name: each
            for name, each in logged.items()
            if each is not self._known.get(name) and name not in numbers and each.numel() == 1
        }
        self.run.log(**numbers, **later)
        self._known = {**logged}


def _number(name: str, index: int, among: list[Any]) -> str:
    return f"{name}_{index}" if len(among) > 1 else name


class HeldLoader:
    """The train loader over which Lightning iterates. Each batch is a step of the run."""

    def __init__(self, loader: Any, boundary: Boundary) -> None:
        self._loader, self._boundary = loader, boundary

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> "HeldLoader":
        return self

    def __next__(self) -> Any:
        return self._boundary.next_batch()

    def __getattr__(self, name: str) -> Any:
        # hide these attributes from Lightning, because the run saves the position
        if name in ("_loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class HeldFitLoop(_FitLoop):
    """Lightning's fit loop, which gives each batch as a step of the run, and ends with the run."""

    _data_source: Any

    def __init__(self, trainer: pl.Trainer, boundary: Boundary) -> None:
        given = trainer.fit_loop
        epochs = boundary.run.config.epochs
        super().__init__(trainer, min_epochs=given.min_epochs, max_epochs=epochs)
        if given.max_epochs not in (None, -1, epochs):
            log.warning(
                "Trainer(max_epochs=%s) is ignored: the configuration has epochs = %d", given.max_epochs, epochs
            )
        self.epoch_loop = given.epoch_loop
        self._boundary = boundary

    def setup_data(self) -> None:
        """Request the train loader once, and replace it by the run's `HeldLoader`."""
        if self._combined_loader is not None:
            return
        trainer, boundary = self.trainer, self._boundary
        source = self._data_source
        loader = trainer._data_connector._prepare_dataloader(  # this adds a DistributedSampler for several ranks
            _request_dataloader(source), shuffle=True, mode=RunningStage.TRAINING
        )
        self._data_source = _DataLoaderSource(boundary.hold(loader), source.name)
        limit, trainer.limit_train_batches = trainer.limit_train_batches, boundary.length
        if isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None:
            # a proof may have shortened the epoch
            trainer.val_check_interval = min(trainer.val_check_interval, boundary.length)
        super().setup_data()
        trainer.limit_train_batches = limit

    def on_run_start(self) -> None:
        """Call ``on_train_start``, and restore the signal handlers that Lightning has replaced.

        On SIGTERM, Lightning's handler would end the loop with an error after the step, before the run could save.
        """
        self.trainer._signal_connector.teardown()
        self.trainer._signal_connector.received_sigterm = False
        super().on_run_start()

    def on_advance_start(self) -> None:
        """Begin an epoch. If the run resumes, Lightning skips ``on_train_epoch_start``, which ran before the save."""
        if self._boundary.open():
            self._restart_stage = RestartStage.RESTARTED_MID_EPOCH
        super().on_advance_start()

    def on_run_end(self) -> None:
        """End the run before Lightning calls ``on_train_end``, because the run doesn't save what that hook changes."""
        self._boundary.finish()
        super().on_run_end()
