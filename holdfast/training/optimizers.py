"""Several optimizers behind the interface of a single optimizer."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import RecipeError
from holdfast.state import is_sharded, lay_as, strides_of

# The keys of an optimizer's ``state_dict`` that torch fills.
STATE, GROUPS = "state", "param_groups"


class Optimizers:
    """Several optimizers with the interface of a single optimizer, for code that handles one optimizer's state.

    ``param_groups`` has the groups of all optimizers, in the order of the optimizers' names.

    Attributes:
        parts: the optimizers, by name.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        """
        Raises:
            RecipeError: two optimizers step the same parameter. A checkpoint contains one state for a parameter's name.
        """
        self.parts = dict(sorted(parts.items()))
        owners: dict[int, str] = {}
        for name, optimizer in self.parts.items():
            for parameter in list_stepped(optimizer):
                if owners.setdefault(id(parameter), name) != name:
                    raise RecipeError(
                        f"the optimizers {owners[id(parameter)]!r} and {name!r} step the same parameter of shape "
                        f"{tuple(parameter.shape)}",
                        hint="give each parameter to one optimizer; a loop with first one and then another optimizer "
                        "keeps both in a list: run.keep(optimizers=[...])",
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the live parameter groups of all optimizers."""
        return [group for part in self.parts.values() for group in part.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return one state for all optimizers. The numbers of parameters continue from one optimizer to the next."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, part in zip(self._firsts(), self.parts.values(), strict=True):
            own = part.state_dict()
            state |= {key + first if isinstance(key, int) else key: value for key, value in own[STATE].items()}
            groups += [group | {"params": [number + first for number in group["params"]]} for group in own[GROUPS]]
        return {STATE: state, GROUPS: groups}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load into each optimizer its part of a state from `state_dict`."""
        groups = iter(saved[GROUPS])
        for first, part in zip(self._firsts(), self.parts.values(), strict=True):
            numbers = range(first, first + len(list_stepped(part)))
            state = {key - first: value for key, value in saved[STATE].items() if key in numbers}
            own = [
                group | {"params": [number - first for number in group["params"]]}
                for group in itertools.islice(groups, len(part.param_groups))
            ]
            part.load_state_dict({STATE: state, GROUPS: own})

    def step(self) -> None:
        """Step each optimizer."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters."""
        for part in self.parts.values():
            part.zero_grad()

    def _firsts(self) -> list[int]:
        """Return the number of each optimizer's first parameter."""
        counts = [len(list_stepped(part)) for part in self.parts.values()]
        return [0, *itertools.accumulate(counts)][: len(counts)]


def refuse_partitioned(name: str, optimizer: Any) -> None:
    """Raise RecipeError if each rank's optimizer holds the state of only some parameters.

    ``ZeroRedundancyOptimizer`` divides its state so. Its ``state_dict`` works only after ``consolidate_state_dict``,
    which collects the state in one rank, and its ``load_state_dict`` needs the whole state in every rank.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for each in (optimizer, inner):
        if callable(getattr(each, "consolidate_state_dict", None)):
            raise RecipeError(
                f"{name} is a {type(each).__name__}, which divides its state over the ranks: no rank can save or "
                "restore all of it",
                hint='use the optimizer itself, such as AdamW; compute.parallel = "fsdp" shards its state, too',
            )


def list_stepped(optimizer: Any) -> list[nn.Parameter]:
    """Return the tensors that an optimizer, or `Optimizers`, steps, in the order of the groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def list_members(optimizer: Any) -> list[tuple[torch.optim.Optimizer, nn.Parameter]]:
    """Return pairs of an optimizer and a tensor that it steps. The tensors have the order of `list_stepped`."""
    return [(part, each) for part in parts_of(optimizer) for each in list_stepped(part)]


def parts_of(optimizer: Any) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers inside `Optimizers`, or the single optimizer."""
    return list(optimizer.parts.values()) if isinstance(optimizer, Optimizers) else [optimizer]


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the attributes for hooks that it lacks because its class doesn't call torch's constructor.

    A wrapper such as Lookahead or opacus's ``DPOptimizer`` takes its groups and its state from the optimizer inside it.
    """
    if _list_hooks() - vars(optimizer).keys():
        if not hasattr(optimizer, "defaults"):
            optimizer.defaults = {}
        torch.optim.Optimizer.__setstate__(optimizer, {})  # what torch does for optimizers pickled by an old version


@functools.cache
def _list_hooks() -> set[str]:
    """Return the names of the attributes for hooks that torch's constructor sets."""
    return {name for name in vars(torch.optim.SGD([torch.zeros(1)])) if name.endswith("_hooks")}


def read_rates(optimizer: Any) -> list[float]:
    """Return the learning rates of the parameter groups; groups without a rate are left out."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def lay_out_state(optimizer: Any, *, are_saved: bool) -> None:
    """Lay out an optimizer's loaded state like its parameters: tensors of a parameter's shape get its strides.

    torch's fused kernels combine the elements of a moment and its parameter by their order in memory, not by index.

    Args:
        are_saved: whether the tensors were saved with their strides. If so, no element moves: only the strides of
            dimensions of length 1 change, which have no effect.
    """
    for part, parameter in list_members(optimizer):
        state = part.state.get(parameter, {})
        for name, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(value, Tensor) or value.shape != parameter.shape or not _has_strides(value, parameter):
                continue
            if not are_saved and strides_of(value) != strides_of(parameter):
                value = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
            state[name] = lay_as(value, parameter)


def _has_strides(*tensors: Tensor) -> bool:
    return all(each.layout is torch.strided and not is_sharded(each) for each in tensors)
