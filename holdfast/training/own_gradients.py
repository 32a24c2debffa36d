"""The checksum, for the trail, of this rank's own gradient before DDP averages the gradients over the ranks.

A machine that computes wrongly spoils the average in all ranks. Only the ranks' own gradients show which machine it is.
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
        self._again: list[tuple[Callable[[], int], Callable[[], int]]] = []

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Take checksums of the gradients of a step that the block trains.

        If several backward passes add to a gradient, the gradient after the last pass counts. Hooks read it before DDP
        averages it over the ranks. Outside of ``no_sync()`` DDP averages a gradient after each pass; a later pass would
        add to an average. So no checksum is taken if any gradient was changed between two passes. None is taken for a
        sharded model either, because FSDP2 and DTensor reduce gradients before the parameters get them.
        """
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._names, self._sums, self._again = [*trained], {}, []
        if any(map(is_sharded, model.parameters())):
            trained = {}
        hooks = [_watch(each, self._make_note(name)) for name, each in trained.items()]
        hooks += [_watch_before(each, self._make_check(name, each)) for name, each in trained.items()]
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

    def _make_check(self, name: str, parameter: Tensor) -> Callable[[Tensor], None]:
        """Return a hook that is run before a backward pass adds to a parameter's gradient."""

        def check(_: Tensor) -> None:
            if name in self._sums and parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._again.append((self._sums[name], begin_checksum(parameter.grad)))

        return check

    def describe(self) -> str:
        """Return a checksum of the step's gradients, 16 hex characters. This waits for the device.

        The result is empty if there were no gradients, or if a gradient was changed between two passes.
        """
        if not self._sums or any(noted() != found() for noted, found in self._again):
            return ""
        return join_checksums([self._sums[name]() if name in self._sums else None for name in self._names])


def _watch(parameter: Any, note: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)
    return handle


def _watch_before(parameter: Any, check: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_hook(check)
    return handle
