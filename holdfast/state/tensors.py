"""Access to the bytes of a torch tensor on any device."""

import torch


class TensorBytes:
    """The bytes of a non-empty tensor on any device, row-major; a `checkpoint.payload.Source`."""

    __slots__ = ("_size_bytes", "address", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._size_bytes, self.address = tensor, tensor.nbytes, _address_of(tensor)

    def __len__(self) -> int:
        return self._size_bytes

    @property
    def is_on_host(self) -> bool:
        return self.tensor.is_cpu

    def __getitem__(self, piece: slice) -> "TensorBytes":
        return TensorBytes(self._flat()[piece])

    def in_memory(self) -> memoryview:
        """Return the bytes: a view if they are contiguous in this process's memory, otherwise a copy."""
        return self._flat().cpu().numpy().data

    def copy_to(self, target: memoryview) -> None:
        """Copy the bytes to the target, and wait until the copy is done."""
        torch.frombuffer(target, dtype=self.tensor.dtype).view(self.tensor.shape).copy_(self.tensor.detach())

    def _flat(self) -> torch.Tensor:
        return self.tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory was freed, as FSDP2 does between steps. A read would end in SIGSEGV."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().size() < (tensor.storage_offset() + last + 1) * tensor.itemsize


def _address_of(tensor: torch.Tensor) -> int:
    is_plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.data_ptr() if is_plain else 0
