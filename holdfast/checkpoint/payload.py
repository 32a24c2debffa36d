"""A state as a payload: tensors as pieces of bytes on any device, and one JSON value for everything else.

This module doesn't use torch. `holdfast.state` makes payloads from torch tensors, and `format` cuts them into files.
"""

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from holdfast.store import Bytes


class Source(Protocol):
    """A tensor's bytes on any device, copied only on request.

    Attributes:
        address: the address of the bytes if they are contiguous in this process's memory; otherwise 0.
        is_on_host: whether the bytes are in this process's memory, and not on another device.
    """

    address: int

    @property
    def is_on_host(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> "Source": ...

    def in_memory(self) -> Bytes:
        """Return the bytes: a view if they are in this process's memory, otherwise a copy."""

    def copy_to(self, target: memoryview, /) -> None:
        """Copy the bytes to the target, and wait until the copy is done."""


Piece = Bytes | Source


def in_memory(piece: Piece) -> Bytes:
    """Return the bytes of a piece; copy them only if they are not in this process's memory."""
    return piece if isinstance(piece, Bytes) else piece.in_memory()


def copy_pieces(pieces: Iterable[Piece], target: memoryview) -> None:
    """Copy the pieces to the target, one after the other, and release the GIL during each copy.

    Raises:
        ValueError: the target is too small.
    """
    import numpy as np  # NumPy's copies release the GIL, Python's don't

    copy = np.frombuffer(target, np.uint8)
    start, position = copy.ctypes.data, 0
    for piece in pieces:
        end = position + len(piece)
        if end > len(target):
            raise ValueError(f"the target of {len(target)} bytes is too small")
        if isinstance(piece, Bytes):
            copy[position:end] = np.frombuffer(piece, np.uint8)
        elif piece.address:
            ctypes.memmove(start + position, piece.address, end - position)
        else:
            piece.copy_to(target[position:end])
        position = end


class Tensor(NamedTuple):
    """A tensor: dtype, shape, and its bytes (row-major, little-endian) in one or several pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


@dataclass(frozen=True)
class Payload:
    """A state: tensors by name, and everything that is not a tensor as one JSON value."""

    tensors: Mapping[str, Tensor]
    tree: Any
