"""The adapter for Lightning: a Trainer's own loop trains the steps of a run.

``fit(run, trainer, module, ...)`` replaces ``trainer.fit(module, ...)``. A step of the run is a batch of the train
loader. Each time that Lightning asks for a batch, the run records the last step, and saves, restores or stops.
"""

from typing import Any

from holdfast.terminal.distribution import spell_install

try:
    import lightning.pytorch as pl

    if not pl.__version__.startswith("2.6."):  # the adapter uses private attributes of version 2.6
        raise ImportError(f"found {pl.__version__}")
except ImportError as error:
    message = f"holdfast.adapters.lightning needs Lightning 2.6: {error}; {spell_install('lightning')}"
    raise ImportError(message, name="lightning") from None

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from holdfast.adapters.lightning_loop import Boundary, HeldFitLoop, Outputs
from holdfast.terminal import counted
from holdfast.training.devices import required_of_ddp
from holdfast.training.own_loop.run import Run, loop_of

# Callbacks that can't be resumed exactly, each with the reason.
REFUSED_CALLBACKS: tuple[tuple[type[pl.Callback], str], ...] = (
    (Timer, "ends training by the clock, so a resumed run would end at a different step"),
    (StochasticWeightAveraging, "replaces the schedulers and adds an epoch, so a run can't be resumed exactly"),
    (BaseFinetuning, "adds parameters to the optimizer during training, so a run can't be resumed exactly"),
    (ModelPruning, "replaces parameters during training, so a run can't be resumed exactly"),
    (LearningRateFinder, "trains trial steps before the run's steps, so a run can't be resumed exactly"),
    (BatchSizeFinder, "trains trial steps before the run's steps, so a run can't be resumed exactly"),
)


def fit(
    run: Run,
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    ckpt_path: Any = None,
) -> None:
    """Train as ``trainer.fit(model, ...)`` does, in steps of a run.

    Each batch of the train loader is a step. The configuration's ``epochs`` sets the run's length, in place of the
    Trainer's ``max_epochs``. The run saves the module, optimizers, schedulers, callbacks, metrics, accumulated
    gradients and the counters of Lightning's loops.

    Args:
        ckpt_path: must be None, because the run continues from its own last checkpoint.

    Raises:
        RecipeError: the Trainer has a setting with which a run can't be resumed exactly, or has stopped early.
    """
    loop_of(run).framework = "a Lightning Trainer"
    if not isinstance(trainer, pl.Trainer):
        found = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
        loop_of(run).refuse(
            f"fit: expected a lightning.pytorch.Trainer, found a {found}",
            hint="create the Trainer with `import lightning as L`",
        )
    if ckpt_path is not None:
        loop_of(run).refuse(
            f"fit(ckpt_path={ckpt_path!r}): a run resumes from its own last checkpoint only",
            hint="leave ckpt_path out; to begin with the weights of a file, load them into the module before fit",
        )
    _refuse_settings(run, trainer)
    _refuse_devices(run, trainer)
    _refuse_layout(run, trainer)
    _refuse_callbacks(run, trainer)
    if is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True):
        loop_of(run).refuse(
            "training_step(dataloader_iter) reads the batches itself, so a resume can't restore the position in the "
            "data",
            hint="write training_step(batch, batch_idx)",
        )
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy._ddp_kwargs |= required_of_ddp(run.world_size)
    outputs = Outputs()
    trainer.callbacks.append(outputs)
    trainer.fit_loop = HeldFitLoop(trainer, Boundary(run, trainer, outputs))
    trainer.fit(model, train_dataloaders, val_dataloaders, datamodule)


def _refuse_settings(run: Run, trainer: pl.Trainer) -> None:
    """Raise RecipeError for a setting with which a run can't be resumed exactly."""
    length = "leave it out: epochs in the configuration and limit_train_batches set the run's length"
    refused = {
        "fast_dev_run": (trainer.fast_dev_run, "leave it out; holdfast prove tries the first steps"),
        "overfit_batches": (trainer.overfit_batches, "use limit_train_batches=... and a loader without shuffle"),
        "max_steps": (trainer.max_steps != -1, length),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            "leave it out: the run uses one train loader",
        ),
        "val_check_interval": (trainer._val_check_time_interval is not None, "give a number of batches, not a time"),
    }
    for name, (is_set, hint) in refused.items():
        if is_set:
            loop_of(run).refuse(f"a run with Trainer({name}=...) can't be resumed exactly", hint=hint)
    if run.accelerator.mixed_precision != "no":
        loop_of(run).refuse(
            f"compute.mixed_precision = {run.accelerator.mixed_precision!r} has no effect on Lightning's loop",
            hint='set Trainer(precision="bf16-mixed"), and leave compute.mixed_precision out',
        )


def _refuse_devices(run: Run, trainer: pl.Trainer) -> None:
    """Raise RecipeError unless the Trainer uses the run's device, and as many processes as the run has ranks."""
    wanted = (SingleDeviceStrategy,) if run.world_size == 1 else (DDPStrategy, ModelParallelStrategy)
    if type(trainer.strategy) not in wanted or trainer.world_size != run.world_size:
        found = f"{type(trainer.strategy).__name__} over {counted(trainer.world_size, 'rank')}"
        expected = " or ".join(each.__name__ for each in wanted)
        loop_of(run).refuse(
            f"the Trainer uses {found}, but the run has {counted(run.world_size, 'rank')}: expected {expected}",
            hint='create Trainer(devices=run.world_size, strategy="ddp" if run.world_size > 1 else "auto"); '
            "compute.ranks in the configuration sets the number of ranks",
        )
    if _normalize(trainer.strategy.root_device) != _normalize(run.device):
        loop_of(run).refuse(
            f"the Trainer trains on {trainer.strategy.root_device}, but the run on {run.device}",
            hint=f"set Trainer(accelerator={'gpu' if run.device.type == 'cuda' else run.device.type!r}, devices=1), or "
            "change compute.device in the configuration",
        )


def _refuse_layout(run: Run, trainer: pl.Trainer) -> None:
    """Raise RecipeError if a `ModelParallelStrategy` does anything besides sharding the module over all ranks."""
    strategy = trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy):
        return
    sizes = strategy._data_parallel_size, strategy._tensor_parallel_size
    if sizes != (run.world_size, 1):
        loop_of(run).refuse(
            f"ModelParallelStrategy(data_parallel_size={sizes[0]!r}, tensor_parallel_size={sizes[1]!r}): expected "
            f"{run.world_size} and 1, because only FSDP2 over all ranks can be resumed exactly",
            hint="create ModelParallelStrategy(data_parallel_size=run.world_size, tensor_parallel_size=1)",
        )
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging):
            loop_of(run).refuse(
                f"the callback {type(callback).__name__} copies the module, and torch can't copy a sharded one",
                hint="leave the callback out, or train with DDPStrategy",
            )


def _normalize(device: Any) -> tuple[str, int]:
    return device.type, device.index or 0


def _refuse_callbacks(run: Run, trainer: pl.Trainer) -> None:
    """Raise RecipeError for a callback that can't be resumed exactly."""
    for callback in trainer.callbacks:
        for kind, reason in REFUSED_CALLBACKS:
            if isinstance(callback, kind):
                loop_of(run).refuse(f"the callback {type(callback).__name__} {reason}", hint="leave this callback out")
