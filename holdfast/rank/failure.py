"""The error that a rank reports when its code raises an exception, and whether new ranks would raise it again."""

import os
import re
import socket

import torch
from torch.distributed import DistError

from holdfast.errors import HoldfastError, OutOfMemory, RankDied, RecipeBroken, RecipeError, RecipeFailed
from holdfast.provenance.location import describe_error, find_hint
from holdfast.provenance.ownership import is_own
from holdfast.rank.process import NODE_VARIABLE
from holdfast.training import Training

# torch raises a RuntimeError with this text if the CPU's memory runs out.
CPU_OUT_OF_MEMORY = "can't allocate memory"
# gloo and NCCL raise a RuntimeError with one of these texts if another rank has died.
LOST_CONNECTION = ("gloo/transport", "by peer", "ncclRemoteError", "ncclSystemError")
# Errors of a program. New ranks train the same steps and would raise them again.
OF_PROGRAMS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
# Errors of devices, networks and other processes, which may not occur again in new ranks. torch raises many of these as
# RuntimeError; SURROUNDINGS matches their texts.
OF_SURROUNDINGS = (OSError, EOFError, DistError, torch.AcceleratorError)
SURROUNDINGS = re.compile(
    r"CUDA|cuDNN|CUBLAS|\bHIP\b|MIOpen|NCCL|RCCL|DataLoader worker \(pid|[Pp]in memory|shared memory|ancdata"
    r"|Too many open files|[Tt]imed out|[Tt]imeout|[Cc]onnection (closed|reset|refused|aborted)"
)


def describe_failure(training: Training | None, error: Exception) -> HoldfastError:
    """Return the error to report for an exception that ended this rank. Return an error of Holdfast unchanged."""
    step = training.progress.step if training else 0
    has_others = int(os.environ.get("WORLD_SIZE", 1)) > 1
    # The ranks may wait for each other while they build the recipe. If a rank dies then, the others raise a
    # RecipeError, and only the cause of this RecipeError shows the lost connection.
    cause = error.__cause__ if isinstance(error, RecipeError) else error
    if has_others and _is_lost_connection(cause):
        return RankDied(f"rank {os.environ['RANK']} lost the connection to another rank in step {step}", is_effect=True)
    if isinstance(error, HoldfastError):
        return error
    rank = f" of rank {os.environ['RANK']}" if has_others else ""
    rank += f" on {socket.gethostname()}" if NODE_VARIABLE in os.environ else ""
    where = f"step {step}{rank}: {describe_error(error)}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_OUT_OF_MEMORY in str(error):
        return OutOfMemory(f"out of memory in {where}", hint="use a smaller batch_size with more grad_accum", step=step)
    kind = RecipeBroken if comes_again(error) else RecipeFailed
    return kind(f"training failed in {where}", hint=find_hint(error), step=step)


def comes_again(error: Exception) -> bool:
    """Return whether new ranks would raise an error again; False if the cause is outside of the code."""
    if isinstance(error, OF_SURROUNDINGS):
        return False
    if isinstance(error, RuntimeError):
        return not SURROUNDINGS.search(str(error))
    return isinstance(error, OF_PROGRAMS) or is_own(type(error))


def _is_lost_connection(error: BaseException | None) -> bool:
    is_of_gloo_or_nccl = isinstance(error, RuntimeError) and not isinstance(error, HoldfastError)
    return isinstance(error, DistError) or (is_of_gloo_or_nccl and any(text in str(error) for text in LOST_CONNECTION))
