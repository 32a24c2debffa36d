"""Trainings on a device that computes late, and faults that only such a device shows; `prepare` begins a process."""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from holdfast.checkpoint import checkpoint_save
from holdfast.checkpoint.payload import copy_pieces
from holdfast.config import Compute, Determinism, RunConfig
from holdfast.state import tensors
from holdfast.state.tensors import TensorBytes
from holdfast.training import devices, program
from holdfast.training.own_loop import running
from tests.support.late_device import Stream, backend
from tests.support.late_kernels import install
from tests.support.trainings import Saved, content_id, live

usual = devices.prepare_device


def prepare() -> int:
    """Make torch know the device in this process, which must not have run a backward pass before. Return 0."""
    install()
    return 0


@contextlib.contextmanager
def training_on(device: torch.device) -> Iterator[None]:
    """Build the block's trainings on a device."""

    def prepare_device(config: RunConfig) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = usual(config)
        accelerator.state.device = PartialState().device = device
        return accelerator

    with (
        patch.object(program, "prepare_device", prepare_device),
        patch.object(running, "prepare_device", prepare_device),
    ):
        yield


def train(folder: str, name: str, stop: int, saved: Saved | None = None, shares: int = 0) -> Saved:
    """Train a program to a step, from its beginning or from a checkpoint; return the checkpoint there."""
    config = RunConfig(
        recipe=f"tests.support.{name}", run="r", store=mkdtemp(dir=folder), epochs=9,
        determinism=Determinism(mode="fast"), compute=Compute(device="cpu", virtual_ranks=shares),
    )  # fmt: skip
    return live(config, stop, saved)[0]


def compare(folder: str, name: str, at: int, stop: int, shares: int = 0, fault: str = "") -> int:
    """Train a program on the CPU, on the late device, and there again with a resume; print the content ids.

    Args:
        folder: the folder for the stores.
        at: the step at which the third training is saved and resumed.
        fault: a fault of `FAULTS` with which the late device's checkpoints are saved.
    """
    with training_on(torch.device("cpu")):
        ids = [content_id(train(folder, name, stop, None, shares))]
    with training_on(install()), FAULTS[fault]() if fault else contextlib.nullcontext():
        ids.append(content_id(train(folder, name, stop, None, shares)))
        ids.append(content_id(train(folder, name, stop, train(folder, name, at, None, shares), shares)))
    print(json.dumps(ids))
    return 0


def _copy_late(self: TensorBytes, target: memoryview) -> None:
    """Copy a tensor's bytes as `TensorBytes.copy_to`, but without a wait."""
    place = torch.frombuffer(target, dtype=self.tensor.dtype).view(self.tensor.shape)
    place.copy_(self.tensor.detach(), non_blocking=True)


def _copy_beside(self: TensorBytes, target: memoryview) -> None:
    """Copy a tensor's bytes in a new stream, which doesn't wait for the stream that trains."""
    with backend.stream(backend.Stream()):
        _copy_to(self, target)


def _copy_freed(self: TensorBytes, target: memoryview) -> None:
    """Copy a tensor's bytes by a tensor that is freed before the copy, which a side stream makes."""
    place = torch.frombuffer(target, dtype=self.tensor.dtype).view(self.tensor.shape)
    passing, side = self.tensor.detach().clone(), backend.Stream()
    side.wait_stream(backend.current_stream())
    with backend.stream(side):
        place.copy_(passing, non_blocking=True)
    del passing
    self.tensor.detach().clone().zero_()  # gets the memory
    backend.current_stream().synchronize()
    side.synchronize()


def _copy_elsewhere(parts: Any, images: Any, copiers: ThreadPoolExecutor) -> None:
    """Copy a save's parts as `copy_out`, but in other threads, which have another current stream."""
    for each in [copiers.submit(copy_pieces, part.pieces, images[part.name]) for part in parts]:
        each.result()


@contextlib.contextmanager
def _planted(*faults: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes for the block: pairs of an owner and a name, each with the new value."""
    with contextlib.ExitStack() as patches:
        for owner, name, new in faults:
            patches.enter_context(patch.object(owner, name, new))
        yield


def _planting(*faults: tuple[Any, str, Any]) -> Callable[[], Any]:
    return lambda: _planted(*faults)


_copy_to = TensorBytes.copy_to
_NO_WAIT = (torch.accelerator, "synchronize", lambda *device: None)
# Faults of a save on a device that computes late, each of which the checkpoint's bytes show. The wait for the device
# alone makes copies in other streams and threads right.
FAULTS: dict[str, Callable[[], Any]] = {
    "doesn't wait for the device": _planting(_NO_WAIT),
    "copies without a wait": _planting((TensorBytes, "copy_to", _copy_late)),
    "copies in a side stream": _planting(_NO_WAIT, (TensorBytes, "copy_to", _copy_beside)),
    "copies in another thread": _planting(_NO_WAIT, (checkpoint_save, "copy_out", _copy_elsewhere)),
    "frees a tensor that a side stream copies": _planting((TensorBytes, "copy_to", _copy_freed)),
    "reads an address of the device": _planting((tensors, "_address_of", lambda tensor: tensor.data_ptr())),
    "lets no stream wait": _planting((Stream, "wait_stream", lambda self, stream: None)),
}
