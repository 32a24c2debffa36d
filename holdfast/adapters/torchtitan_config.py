"""The check of a torchtitan config: can a run resume exactly with it, and does it agree with the run's configuration?

Importing this module imports nothing of torchtitan.
"""

import copy
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from holdfast.config import Compute
from holdfast.errors import RecipeError
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE
from holdfast.terminal import counted
from holdfast.training.objects import PATIENCE

__all__ = ["be_patient_in", "check_config", "divide_steps"]

DEGREES = "data_parallel_shard_degree, data_parallel_replicate_degree and tensor_parallel_degree"


def check_config(compute: Compute, ranks: int, config: Any) -> None:
    """Raise RecipeError if a config can't be resumed exactly, or doesn't agree with the run's configuration.

    Args:
        ranks: the run's number of ranks.
        config: torchtitan's configuration.
    """
    for name, is_set, hint in _list_refused(config):
        if is_set:
            raise RecipeError(f"a run with {name} in torchtitan's config can't be resumed exactly", hint=hint)
    for name, is_set, hint in (
        (
            "mixed_precision",
            compute.mixed_precision != "no",
            "set training.mixed_precision_param in torchtitan's config",
        ),
        ("virtual_ranks", compute.virtual_ranks > 0, "torchtitan divides the batches over the ranks itself"),
        ("parallel", ranks > 1 and compute.parallel != "ddp", "set parallelism in torchtitan's config"),
    ):
        if is_set:
            found = f"compute.{name} = {getattr(compute, name)!r}"
            raise RecipeError(
                f"{found} has no effect, because torchtitan's own config decides this",
                hint=f"leave compute.{name} out: {hint}",
            )
    degrees = config.parallelism
    whole = degrees.data_parallel_replicate_degree * degrees.tensor_parallel_degree
    shard = degrees.data_parallel_shard_degree
    if whole * (ranks // whole if shard < 0 else shard) != ranks:
        found = f"{degrees.data_parallel_replicate_degree} x {shard} x {degrees.tensor_parallel_degree}"
        raise RecipeError(
            f"parallelism is replicate x shard x tensor = {found}, but the run has {counted(ranks, 'rank')}",
            hint="make the product equal to compute.ranks; a shard degree of -1 takes all remaining ranks",
        )


def _list_refused(config: Any) -> Iterator[tuple[str, bool, str]]:
    """Yield, for each setting that prevents an exact resume: its name, whether it is set, and what to write instead."""
    yield "fault_tolerance (torchft)", hasattr(config, "fault_tolerance"), "use a config of torchtitan's own Trainer"
    yield "checkpoint.enable", config.checkpoint.enable, "leave it out: the run saves and resumes by itself"
    yield "checkpoint.create_seed_checkpoint", config.checkpoint.create_seed_checkpoint, "leave it out"
    for name in ("pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        degree = getattr(config.parallelism, name)
        yield f"parallelism.{name} = {degree}", degree > 1, f"set it to 1; a run can use {DEGREES}"
    workers = getattr(config.dataloader, "num_workers", 0)
    yield f"dataloader.num_workers = {workers}", workers > 0, "set it to 0: each rank reads its data itself"
    yield f"comm.mode = {config.comm.mode!r}", config.comm.mode != "default", "set it to 'default'"
    yield "training.enable_cpu_offload", config.training.enable_cpu_offload, "leave it out"


def divide_steps(epochs: int, steps: int) -> int:
    """Return the number of steps of an epoch.

    Args:
        epochs: the number of epochs in the run's configuration.
        steps: the number of steps in torchtitan's configuration.

    Raises:
        RecipeError: the steps can't be divided into this number of epochs.
    """
    if os.environ.get(LONGEST_EPOCH_VARIABLE, "0") != "0":  # a proof sets the number of steps itself
        return steps
    if steps % epochs:
        raise RecipeError(
            f"training.steps = {steps} in torchtitan's config isn't a multiple of the configuration's epochs = "
            f"{epochs}",
            hint="set epochs = 1 in the configuration: one epoch then has all steps",
        )
    return steps // epochs


def be_patient_in(config: Any) -> Any:
    """Return a copy of torchtitan's config with which its Trainer doesn't shorten the timeout of collectives.

    By default torchtitan lets collectives wait for 100 s after the first step. A rank may wait longer for a slow store.
    """
    patient = copy.copy(config)
    patient.comm = dataclasses.replace(config.comm, train_timeout_seconds=int(PATIENCE.total_seconds()))
    return patient
