"""Checksums of the state's components, for the trail.

Content ids show that two runs differ; the trail shows in which step and in which component they differ first.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast import state
from holdfast.checkpoint.departure import causes_first
from holdfast.provenance.fingerprint import canonical_json
from holdfast.state.checksum import checksum, checksum_together, checksum_value
from holdfast.state.tensor_forms import list_tensors
from holdfast.training.build import Training
from holdfast.training.capturing import capture_own, copy_extras
from holdfast.training.division import make_division


def describe_components(training: Training, *, in_detail: bool) -> dict[str, Any]:
    """Return a checksum, 16 hex characters, for each component of the state that a step changes.

    Components are ``buffers``, ``optimizer`` (its hyperparameters), ``optimizer.<kind>`` for each kind of moment,
    ``model``, ``schedulers``, ``scaler`` and ``extras.<name>``. A component comes before the components that it affects
    within a step. If the state is sharded, or the ranks hold stages of a pipeline, all ranks call this together, and
    get the checksums of the whole state.

    Args:
        in_detail: whether to add each tensor's own checksum, under the key ``tensors``.
    """
    payload = state.to_payload(capture_own(training))
    buffers = {name for name, _ in training.recipe.model.named_buffers()}
    members: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in list_tensors(payload).items():
        members.setdefault(_component_of(name, buffers), {})[name] = tensor
    values = _values_of(payload.tree)
    if training.ranks.stages is not None:
        return make_division(training).describe(members, values, in_detail=in_detail)
    names = sorted(members.keys() | values.keys(), key=causes_first)
    found: dict[str, Any] = {}
    for name in names:
        tensors = checksum_together(list(members.get(name, {}).values()))
        found[name] = f"{(tensors + values.get(name, 0)) % 2**64:016x}"
    if in_detail:
        each = {name: tensor for component in members.values() for name, tensor in component.items()}
        sums = dict(zip(each, checksum(list(each.values())), strict=True))
        found["tensors"] = {name: f"{value:016x}" for name, value in sums.items()}
    return found


@contextlib.contextmanager
def undone_extras(training: Training) -> Iterator[Callable[[], bool]]:
    """Undo, after the block, what the block has changed in the extras.

    Yields: a function that returns whether the extras are as they were before the block.
    """

    def describe() -> dict[str, Any]:
        found = describe_components(training, in_detail=False)
        return {name: each for name, each in found.items() if name.startswith("extras.")}

    put_back, before = copy_extras(training), describe()
    yield lambda: describe() == before
    put_back()


def _component_of(name: str, buffers: set[str]) -> str:
    """Return the component of a tensor: ``optimizer.exp_avg`` for ``optimizer.state.0.weight.exp_avg``."""
    first, _, rest = name.partition(".")
    if first == "model":
        return "buffers" if rest in buffers else "model"
    if first == "optimizer":
        kind = next((part for part in reversed(rest.split(".")) if not part.isdigit()), "")
        return f"optimizer.{kind}"
    if first == "extras":
        return f"extras.{rest.partition('.')[0]}"
    return first


def _values_of(tree: dict[str, Any]) -> dict[str, int]:
    """Return a checksum of the plain values (everything but tensors) of each component."""
    extras = {f"extras.{name}": value for name, value in tree["extras"].items()}
    others = {name: tree[name] for name in ("optimizer", "schedulers", "scaler") if tree[name]}
    return {name: checksum_value(canonical_json([value])) for name, value in (others | extras).items()}
