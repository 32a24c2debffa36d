"""Pinned (page-locked) memory, into which a GPU copies at full speed.

``HOLDFAST_WITHOUT=pinning`` turns pinning off. The gain has not been measured yet, because that needs a GPU.

Source: the CUDA runtime's documentation of cudaHostRegister; https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable

import torch

from holdfast.memory.switches import is_on

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process

log = logging.getLogger(__name__)


def pinning(device: torch.device) -> Callable[[memoryview], None] | None:
    """Return a function that pins memory for this device; None if the device needs no pinned memory."""
    return functools.partial(_pin, device) if device.type == "cuda" and is_on("pinning") else None


def _pin(device: torch.device, memory: memoryview) -> None:
    """Pin memory for copies from this device. If CUDA refuses, log a warning: copies then still work, slowly."""
    # The device of a single rank is "cuda", without an index.
    number = torch.cuda.current_device() if device.index is None else device.index

    def register() -> None:
        try:
            torch.cuda.set_device(number)  # without this, a new thread uses the first GPU, and allocates memory there
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            problem = torch.cuda.cudart().cudaHostRegister(address, len(memory), PORTABLE)  # type: ignore[no-untyped-call]
        except Exception as error:
            problem = error
        if problem != 0:
            log.warning("%s bytes for checkpoints can't be pinned: %s", f"{len(memory):,}", problem)

    # Pin in a separate thread, because CUDA would report a refusal a second time at the next kernel of the same thread.
    thread = threading.Thread(target=register, name="pin")
    thread.start()
    thread.join()
