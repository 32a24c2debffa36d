"""Pinned (page-locked) memory, into which a GPU copies at full speed.

CUDA needs seconds to pin tens of gigabytes, so the first save uses memory that isn't pinned, and its threads pin it
after the checkpoint is durable. ``HOLDFAST_WITHOUT=pinning`` turns pinning off. The gain has not been measured yet,
because that needs a GPU.

Source: the CUDA runtime's documentation of cudaHostRegister;
https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

import ctypes
import functools
import logging
import threading

import torch

from holdfast.memory.buffers import Pin, Unpin
from holdfast.memory.switches import is_on

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process

log = logging.getLogger(__name__)


def pinning(device: torch.device) -> Pin | None:
    """Return a function that pins memory for this device; None if the device needs no pinned memory."""
    if device.type != "cuda" or not is_on("pinning"):
        return None
    # The device of a single rank is "cuda", without an index.
    return functools.partial(_pin, torch.cuda.current_device() if device.index is None else device.index)


def _pin(number: int, memory: memoryview) -> Unpin:
    """Pin memory for copies from the GPU of this number. Return a function that unpins it.

    If CUDA refuses, log a warning and return None: copies then still work, slowly.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    problem = f"{len(memory):,} bytes for checkpoints can't be"
    if not _call(number, f"{problem} pinned", "cudaHostRegister", address, len(memory), PORTABLE):
        return None
    return lambda: _call(number, f"{problem} unpinned", "cudaHostUnregister", address)


def _call(number: int, problem: str, function: str, *arguments: int) -> bool:
    """Call a function of the CUDA runtime. Return whether it has succeeded; otherwise log a warning.

    Args:
        problem: the beginning of the warning.
    """
    refusals: list[object] = []

    def call() -> None:
        try:
            torch.cuda.set_device(number)  # without this, a new thread uses the first GPU, and allocates memory there
            # convert with int(), because torch returns an enum
            answer: object = int(getattr(torch.cuda.cudart(), function)(*arguments))  # type: ignore[no-untyped-call]
        except Exception as error:
            answer = error
        if answer != 0:
            log.warning("%s: %s", problem, answer)
            refusals.append(answer)

    # Use a separate thread, because CUDA would report a refusal a second time at the next kernel of the same thread.
    thread = threading.Thread(target=call, name="pin")
    thread.start()
    thread.join()
    return not refusals
