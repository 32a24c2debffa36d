"""Where the bytes of tensors are, and memory that a GPU copies to at its full speed.

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


class TensorBytes:
    """The bytes of a tensor that isn't empty, row-major, wherever it is. See `checkpoint.Source`."""

    __slots__ = ("_size_bytes", "address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._size_bytes, self.address = tensor, tensor.nbytes, _address_of(tensor)

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, piece: slice) -> "TensorBytes":
        return TensorBytes(self._flat()[piece])

    def in_memory(self) -> memoryview:
        """The bytes themselves, or a copy."""
        return self._flat().cpu().numpy().data

    def copy_to(self, target: memoryview) -> None:
        """Return when the bytes are there."""
        torch.frombuffer(target, dtype=self.tensor.dtype).view(self.tensor.shape).copy_(self.tensor.detach())

    def _flat(self) -> torch.Tensor:
        return self.tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _address_of(tensor: torch.Tensor) -> int:
    is_plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.data_ptr() if is_plain else 0


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
