"""The gradient of this rank alone, before DDP averages it over the ranks: a checksum of it for the trail.

A machine that computes wrongly spoils the average in all ranks. Only the ranks' own gradients tell which of them it is.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast.state import is_sharded
from holdfast.state.checksum import begin_checksum, join_checksums


class OwnGradients:
    """The checksums of this rank's gradients of the last step that was trained in `watching`."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: dict[str, Callable[[], int]] = {}

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the gradients of a step that is trained in the block.

        Several backward passes add to a gradient, so the last one counts. DDP averages a gradient after the hooks here
        have seen it. A model with shards isn't watched, because FSDP2 and DTensor reduce gradients before they are in
        the parameters.
        """
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._names, self._sums = [*trained], {}
        if any(map(is_sharded, model.parameters())):
            trained = {}
        hooks = [_watch(each, self._make_note(name)) for name, each in trained.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _make_note(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._sums[name] = begin_checksum(parameter.grad)

        return note

    def describe(self) -> str:
        """Return a checksum of the step's gradients, 16 hex characters; empty if none was seen. Wait for the device."""
        if not self._sums:
            return ""
        return join_checksums([self._sums[name]() if name in self._sums else None for name in self._names])


def _watch(parameter: Any, note: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)
    return handle
