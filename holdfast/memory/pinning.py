"""Memory that a GPU copies to at its full speed.

``HOLDFAST_WITHOUT=pinning`` turns it off. The gain needs a GPU to be measured; no figure of ours is on record.

Source: the CUDA runtime's documentation of cudaHostRegister; https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable

import torch

from holdfast.memory.switches import is_on

PORTABLE = 1  # cudaHostRegisterPortable: whichever of the process's GPUs copies

log = logging.getLogger(__name__)


def pinning(device: torch.device) -> Callable[[memoryview], None] | None:
    """Return what pins memory for this device; None if it needs none."""
    return functools.partial(_pin, device) if device.type == "cuda" and is_on("pinning") else None


def _pin(device: torch.device, memory: memoryview) -> None:
    """Forbid the system to move this memory. If it refuses, copies are slower, and that is all."""

    def register() -> None:
        try:
            torch.cuda.set_device(device)  # a new thread is at the first one, and would take memory there
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            problem = torch.cuda.cudart().cudaHostRegister(address, len(memory), PORTABLE)  # type: ignore[no-untyped-call]
        except Exception as error:
            problem = error
        if problem != 0:
            log.warning("%s bytes for checkpoints can't be pinned: %s", f"{len(memory):,}", problem)

    # In a thread that ends with it: what CUDA refuses is otherwise held against the next kernel of the same thread.
    thread = threading.Thread(target=register, name="pin")
    thread.start()
    thread.join()
