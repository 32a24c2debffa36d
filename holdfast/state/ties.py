"""Ties: memory that saved values share with each other, and that the restored values have to share, too."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.state.originals import Originals, Path
from holdfast.state.tensor_forms import is_sharded, place_of


class Ties:
    """The values that are saved together. Values that share memory at the save share memory after a resume, too.

    Args:
        modules: modules that are restored before the values. Containers may contain tensors of these modules.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self._kept: dict[str, Any] = {}  # tensors and arrays that are kept directly, not in a container
        # By the name of a kept value: the objects that it contains when it is registered.
        self._originals: dict[str, Originals] = {}
        # For each saved value's place in memory: the saved value, and the value into which it was restored. An entry is
        # valid only while the saved value exists, because later another value may get the same place.
        self._restored: dict[Any, tuple[Ref, Ref]] = {}

    def register(self, name: str, value: Any) -> Originals:
        """Register a value that is kept under a name: a tensor, an array or a container. Return its originals."""
        if isinstance(value, Tensor | np.ndarray):
            self._kept[name] = value
        self._originals[name] = Originals(value, name)
        return self._originals[name]

    def list_owned(self) -> dict[str, Tensor]:
        """Return the modules' tensors, by name."""
        return {
            f"{name}.{inner}": tensor
            for name, module in self.modules.items()
            for inner, tensor in [*module.named_parameters(), *module.named_buffers()]
        }

    def list_kept(self) -> Iterator[tuple[str, Any]]:
        """Yield pairs of a name and a tensor or array that is kept directly, not in a container."""
        yield from self._kept.items()

    def find_original(self, value: Any, own: Originals) -> list[Any] | None:
        """Return the name of a different container of which a value is an original, and the original's number there.

        Return None if the value is not an original of a different container.
        """
        for name, each in self._originals.items():
            if each is not own and (number := each.find(value)) is not None:
                return [name, number]
        return None

    def get_original(self, key: Any, own: Originals) -> tuple[Any, Path | None]:
        """Return an original and its path. The original is None if it no longer exists.

        The path is None if the original doesn't belong to ``own``, or no longer exists.

        Args:
            key: the original's number in ``own``, or a result of `find_original`.
        """
        if isinstance(key, int):
            return own.get(key), own.path_of(key) if own.get(key) is not None else None
        found = self._originals.get(key[0])
        return (found.get(key[1]) if found is not None else None), None

    def find(self, saved: Any) -> Any:
        """Return the value into which a saved value was restored; None if it wasn't restored yet.

        A tensor and an array that shared memory at the save were restored into the same memory.
        """
        known, now = self._restored.get(place_in_memory(saved), (_no_value, _no_value))
        found = now() if known() is not None else None
        if isinstance(found, Tensor) and isinstance(saved, np.ndarray):
            return found.detach().numpy()
        return torch.from_numpy(found) if isinstance(found, np.ndarray) and isinstance(saved, Tensor) else found

    def note(self, saved: Any, now: Any) -> None:
        """Record the value into which a saved value was restored."""
        self._restored[place_in_memory(saved)] = weakref.ref(saved), weakref.ref(now)


Ref = Callable[[], Any]


def _no_value() -> None:
    return None


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has elements that are in this process's or a device's memory."""
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0 and bool(place_of(tensor)[0])


def place_in_memory(value: Any) -> Any:
    """Return the place of a tensor or an array in memory; equal for a tensor and an array that share their elements."""
    if isinstance(value, Tensor) and is_sharded(value):
        return place_of(value)
    if isinstance(value, Tensor):
        return value.data_ptr(), tuple(value.shape), tuple(each * value.itemsize for each in value.stride())
    return value.__array_interface__["data"][0], value.shape, value.strides
