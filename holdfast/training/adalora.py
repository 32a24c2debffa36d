"""The state of AdaLoRA's rank allocators, which peft keeps outside of a model's ``state_dict``.

An allocator averages the importance of each weight over the steps, and removes the least important ranks. The pattern
of the remaining ranks is in the adapter's configuration.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.state import Attributes

# The name of the extra with the rank allocators' state.
ALLOCATORS = "rank_allocators"


class RankAllocators:
    """The changed attributes of rank allocators and of their configurations, as an object with a state.

    Args:
        allocators: the allocators, by the names of the modules that hold them.
    """

    def __init__(self, allocators: Mapping[str, Any]) -> None:
        self._parts = {
            name: [Attributes(lambda part=part: part, lambda key: False) for part in (each, each.peft_config)]  # type: ignore[misc]
            for name, each in allocators.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: [part.state_dict() for part in parts] for name, parts in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parts in self._parts.items():
            for part, saved in zip(parts, state[name], strict=True):
                part.load_state_dict(saved)


def find_rank_allocators(model: nn.Module) -> RankAllocators | None:
    """Return the rank allocators of AdaLoRA in a model; None if there are none."""
    named = ((name, vars(module).get("rankallocator")) for name, module in model.named_modules())
    found = {name: each for name, each in named if hasattr(each, "peft_config")}
    return RankAllocators(found) if found else None
