"""The weights that torch's pruning computed in the last forward pass.

``torch.nn.utils.prune`` keeps ``weight_orig`` and ``weight_mask``, and computes ``weight`` from them before each
forward pass. Between an optimizer's step and the next forward pass, ``weight`` still has the value from before the
step, and a further pruning reads that value. So it is saved: otherwise a new process would have the value from the
module's construction.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod


class PrunedTensors:
    """The tensors that pruned modules compute, as an object with a state.

    Args:
        tensors: a pruned module's name, the module, and the name of the tensor that it computes.
    """

    def __init__(self, tensors: Sequence[tuple[str, nn.Module, str]]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {f"{name}.{key}": getattr(module, key).detach() for name, module, key in self._tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, module, key in self._tensors:
            own = getattr(module, key)
            setattr(module, key, state[f"{name}.{key}"].to(own.device, copy=True))


def find_pruned(model: nn.Module) -> PrunedTensors | None:
    """Return the computed tensors of a model's pruned modules; None if there are none."""
    found = [
        (name, module, hook._tensor_name)
        for name, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod)
    ]
    return PrunedTensors(found) if found else None
