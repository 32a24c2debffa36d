"""The check of a Hugging Face Trainer's arguments: can a run resume exactly with them, and do they fit the run?"""

import os
from typing import Any

import torch

from holdfast.errors import RecipeError
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE
from holdfast.terminal.distribution import spell_install
from holdfast.training.devices import choose_cuda
from holdfast.training.own_loop.run import Run

try:
    import transformers
    import transformers.trainer
except ImportError as error:
    message = f"holdfast.adapters.transformers needs transformers: {error}; {spell_install('transformers')}"
    raise ImportError(message, name="transformers") from None

__all__ = ["check_arguments", "choose_length", "transformers"]


def check_arguments(run: Run, trainer: Any, options: dict[str, Any]) -> None:
    """Raise RecipeError if a run can't resume exactly with a Trainer's arguments, or if its configuration differs.

    Args:
        options: further arguments of ``trainer.train``.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise RecipeError(f"train(run, trainer): expected a transformers.Trainer, found a {type(trainer).__name__}")
    args = trainer.args
    for name, is_set, hint in (
        ("resume_from_checkpoint", args.resume_from_checkpoint or options.get("resume_from_checkpoint"),
         "leave it out: the run resumes from its own checkpoints"),
        ("enable_jit_checkpoint", args.enable_jit_checkpoint,
         "leave it out: the run saves on SIGTERM by itself"),
        ("deepspeed", args.deepspeed, "train without DeepSpeed"),
        ("auto_find_batch_size", args.auto_find_batch_size, "set per_device_train_batch_size"),
        ("ignore_data_skip", args.ignore_data_skip, "leave it out: a resume reads no batch again"),
    ):  # fmt: skip
        if is_set:
            raise RecipeError(f"a run with TrainingArguments({name}=...) can't be resumed exactly", hint=hint)
    if any(isinstance(each, transformers.EarlyStoppingCallback) for each in trainer.callback_handler.callbacks):
        raise RecipeError(
            "EarlyStoppingCallback would end the run early, at a step that isn't known in advance",
            hint="remove the callback: the run trains to its last step",
        )
    _check_machine(run, trainer)


def _check_machine(run: Run, trainer: Any) -> None:
    """Raise RecipeError unless the Trainer has the configuration's ranks, device and precision."""
    args, compute = trainer.args, run.config.compute
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if args.world_size != ranks:
        raise RecipeError(
            f"compute.ranks = {ranks}, but the Trainer's world_size is {args.world_size}",
            hint="set TrainingArguments(use_cpu=True)",
        )
    if args.n_gpu > 1:
        raise RecipeError(
            f"the Trainer uses {args.n_gpu} GPUs in one process", hint="set compute.ranks to the number of GPUs"
        )
    if trainer.accelerator.mixed_precision != compute.mixed_precision:
        raise RecipeError(
            f"the Trainer trains in {trainer.accelerator.mixed_precision!r}, but compute.mixed_precision = "
            f'"{compute.mixed_precision}"',
            hint=f'set compute.mixed_precision = "{trainer.accelerator.mixed_precision}", as in TrainingArguments',
        )
    if choose_cuda(compute) != (args.device.type == "cuda"):
        raise RecipeError(
            f'the Trainer trains on {args.device}, but compute.device = "{compute.device}"',
            hint='set both TrainingArguments(use_cpu=True) and compute.device = "cpu", or neither',
        )


def choose_length(run: Run, updates: int, total: int) -> int:
    """Return the number of steps of the run's epoch.

    Args:
        updates: the number of steps of the Trainer's epoch.
        total: the number of steps that the Trainer trains in all epochs.

    Raises:
        RecipeError: the Trainer would train more or fewer steps than the run has.
    """
    epochs = run.config.epochs
    is_proof = os.environ.get(LONGEST_EPOCH_VARIABLE, "0") != "0"  # a proof sets its number of steps itself
    if is_proof or epochs * updates == total:
        return updates
    if total % epochs == 0 and epochs == 1:
        return total
    raise RecipeError(
        f"the Trainer trains {total} steps, {updates} in an epoch, but the configuration has epochs = {epochs}",
        hint=f"set epochs = {total // updates} in the configuration"
        if total % updates == 0
        else "set epochs = 1 in the configuration: one epoch then has all steps",
    )
