"""Checksums of the stages of a pipeline, for the trail."""

from collections.abc import Callable
from typing import Any

import torch

from holdfast.checkpoint.departure import causes_first
from holdfast.state.checksum import checksum

# Returns the values that all ranks pass to it, by rank.
Gather = Callable[[Any], list[Any]]


def describe_stages(
    gather: Gather, members: dict[str, dict[str, torch.Tensor]], values: dict[str, int], *, in_detail: bool
) -> dict[str, Any]:
    """Return the checksums of the whole pipeline's stages, and of this rank's own extras.

    If several ranks hold a tensor, the lowest rank's tensor counts.
    """
    own = {
        component: dict(zip(each, checksum(list(each.values())), strict=True)) for component, each in members.items()
    }
    found = gather([_pick(each, is_extra=False) for each in (own, values)])
    found.insert(0, [_pick(each, is_extra=True) for each in (own, values)])
    sums: dict[str, dict[str, int]] = {}
    plain: dict[str, set[int]] = {}
    for each, others in reversed(found):
        for component, named in each.items():
            sums.setdefault(component, {}).update(named)
        for component, value in others.items():
            plain.setdefault(component, set()).add(value)
    described: dict[str, Any] = {}
    for component in sorted(sums.keys() | plain.keys(), key=causes_first):
        total = sum(plain.get(component, ()))
        for _, value in sorted(sums.get(component, {}).items()):
            total = (total * 31 + value) % 2**64
        described[component] = f"{total % 2**64:016x}"
    if in_detail:
        named = {name: value for each in sums.values() for name, value in each.items()}
        described["tensors"] = {name: f"{value:016x}" for name, value in sorted(named.items())}
    return described


def _pick(components: dict[str, Any], *, is_extra: bool) -> dict[str, Any]:
    """Return the extras' components, which differ between ranks; if ``is_extra`` is False, all other components."""
    return {name: each for name, each in components.items() if name.startswith("extras.") == is_extra}
