"""Tensors on a GPU: their bytes, copied straight to where they are to lie, into memory that is fit for it.

Source: the CUDA runtime's documentation of cudaHostRegister; https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable

import torch

PORTABLE = 1  # cudaHostRegisterPortable: whichever of the process's GPUs copies

log = logging.getLogger(__name__)


class OnDevice:
    """The bytes of a tensor that is not in this machine's memory. They are copied when they are asked for.

    Args:
        flat: one-dimensional, of uint8.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def __len__(self) -> int:
        return len(self._flat)

    def __getitem__(self, piece: slice) -> "OnDevice":
        return OnDevice(self._flat[piece])

    def __bytes__(self) -> bytes:
        return bytes(self._flat.cpu().numpy())

    def copy_to(self, target: memoryview) -> None:
        """Return when the bytes are there."""
        torch.frombuffer(target, dtype=torch.uint8).copy_(self._flat)


def pinning(device: torch.device) -> Callable[[memoryview], None] | None:
    """What pins memory for this device; None if it needs none."""
    return functools.partial(_pin, device) if device.type == "cuda" else None


def _pin(device: torch.device, memory: memoryview) -> None:
    """The system doesn't move this memory any more. If it refuses, copies are slower, and that is all."""

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
