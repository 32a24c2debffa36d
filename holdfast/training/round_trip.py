"""The round trip: write the captured state back into the objects of this process, capture it again, and compare.

The gate would refuse a value that comes back changed at the first restart. So this check refuses it before the first
step, or after the first step if the value exists only then. Afterwards each object has its own attributes and items
again. No large tensor is copied: code of torch and Holdfast gets the live tensor, and code of other classes is tried
only with states up to `MOST_TRIED_BYTES`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast import state
from holdfast.checkpoint import Payload, Tensor, differences
from holdfast.errors import RecipeError, StateError
from holdfast.state.encoding import list_marked
from holdfast.state.tensor_forms import place_of, shard_of
from holdfast.state.values import is_adapter
from holdfast.training.build import Training
from holdfast.training.capturing import UNFIT, capture_own, load, load_optimizer, load_scheduler
from holdfast.training.kept import GRADIENTS, MODES, OWN_EXTRAS
from holdfast.training.optimizers import parts_of
from holdfast.training.references import References
from holdfast.training.tying import tie_to_model

MOST_TRIED_BYTES = 2**30
# Larger tensors aren't copied for code of torch and Holdfast.
COPIED_BYTES = 2**16
# The class of a value inside a state that has no class of its own in the encoding.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor)


@dataclass
class _Tried:
    """A component that is written back.

    Attributes:
        tree: the component's part of the payload's tree.
        owner: the class whose code loads the state; None for torch's and Holdfast's own code.
    """

    name: str
    target: Any
    tree: Any
    owner: type | None


def check_round_trip(training: Training, own: Mapping[str, Any], payload: Payload) -> None:
    """Write the state back, capture it again, and compare.

    Args:
        own: the result of `capture_own`.
        payload: ``own`` as it is encoded.

    Raises:
        StateError: a resume would change a value, or an object can't load its own state.
    """
    is_first, kinds = not training.progress.step, _describe_kinds(own)
    tried = [(each, References([each.target])) for each in _list_tried(training, payload)]
    tried = [(each, references) for each, references in tried if references.is_complete]
    # Decode all components together, because their values may share memory.
    trees = {each.name: each.tree for each, _ in tried}
    saved = state.from_payload(Payload(payload.tensors, trees), copied_bytes=COPIED_BYTES)
    try:
        for each, _ in tried:
            # The code of other classes may write into what it gets.
            is_lent = each.owner is not None and _find_largest(each, payload) > COPIED_BYTES
            try:
                _write_back(training, each, copy.deepcopy(saved[each.name]) if is_lent else saved[each.name])
            except (RecipeError, StateError):
                # An object that makes parts of its state in the first step may load a state only then.
                if each.owner is None or not is_first:
                    raise
        tie_to_model(training, payload)
        now = capture_own(training)
        found = _compare(payload, state.to_payload(now)) or _compare_kinds(kinds, _describe_kinds(now))
    finally:
        for _, references in reversed(tried):
            references.put_back()
    names = {name: each for name in found for each, _ in tried if name == each.name or name.startswith(f"{each.name}.")}
    for name, each in names.items():
        # A resume loads a state into a newly built object. After the first step this object is no longer new, and the
        # code of another class may load a state rightly only into a new object. So a difference proves nothing then.
        if each.owner is None or is_first or each.target is training.optimizer:
            raise _differs(name, found[name], each.owner)


def _list_tried(training: Training, payload: Payload) -> list[_Tried]:
    recipe, tree = training.recipe, payload.tree
    found: list[_Tried] = []
    for number, each in enumerate(training.schedulers):
        owner = None if type(each).load_state_dict.__module__.startswith("torch.") else type(each)
        found.append(_Tried(f"schedulers.{number}", each, tree["schedulers"][number], owner))
    for name, each in sorted(recipe.extras.items()):
        is_ours = is_adapter(each) or (name in OWN_EXTRAS and name != GRADIENTS)
        if not is_ours and (isinstance(each, nn.Module) or type(each).__module__.startswith("holdfast.")):
            continue  # weights are copied in place, and the parts of frameworks are loaded only at a resume
        if name == GRADIENTS or (name == MODES and tree["extras"][name].keys() == {"eval"}):
            continue
        found.append(_Tried(f"extras.{name}", each, tree["extras"][name], None if is_ours else type(each)))
    # The optimizer comes last, as at a resume, because the others may set learning rates.
    found.append(_Tried("optimizer", training.optimizer, tree["optimizer"], _find_owner(training)))
    return [each for each in found if each.owner is None or _count_bytes(each, payload) <= MOST_TRIED_BYTES]


def _count_bytes(tried: _Tried, payload: Payload) -> int:
    return sum(payload.tensors[name].size_bytes for name in {*list_marked(tried.tree)})


def _find_largest(tried: _Tried, payload: Payload) -> int:
    return max((payload.tensors[name].size_bytes for name in list_marked(tried.tree)), default=0)


def _find_owner(training: Training) -> type | None:
    """Return the class of an optimizer whose own code loads its state; None if torch's code does."""
    for part in parts_of(training.recipe.optimizer):
        hooks = (
            *part._optimizer_load_state_dict_pre_hooks.values(),
            *part._optimizer_load_state_dict_post_hooks.values(),
        )
        own = [type(part).load_state_dict, type(part).__setstate__, *hooks]
        if any(not str(getattr(each, "__module__", "")).startswith(("torch.", "holdfast.")) for each in own):
            return type(part)
    return None


def _write_back(training: Training, tried: _Tried, saved: Any) -> None:
    try:
        if tried.target is training.optimizer:
            load_optimizer(training, saved, are_laid_out=True)
        else:
            read = load_scheduler if tried.name.startswith("schedulers.") else load
            read(tried.name, tried.target, saved)
    except StateError as error:
        reason = error.message.rpartition(f"{UNFIT}: ")[2]
        raise StateError(
            f"a resume could not load the state of {tried.name}: {reason}", hint=_advise(tried.owner)
        ) from error


def _compare(payload: Payload, now: Payload) -> dict[str, str]:
    """Return, by name, how the values differ."""
    one, other = _leave_out_same(payload, now), _leave_out_same(now, payload)
    found = differences(state.localize(one), state.localize(other))
    return {name: _describe(payload.tensors.get(name), now.tensors.get(name)) for name in found}


def _leave_out_same(payload: Payload, other: Payload) -> Payload:
    """Return a payload without the bytes of tensors that are at the same place in both payloads."""
    places = {name: _place(each) for name, each in other.tensors.items()}
    tensors = {
        name: Tensor(each.dtype, each.shape, ()) if _place(each) == places.get(name, 0) else each
        for name, each in payload.tensors.items()
    }
    tree = {key: each for key, each in payload.tree.items() if key in other.tree} if payload.tree else payload.tree
    return Payload(tensors, tree)


def _place(tensor: Tensor) -> Any:
    piece = tensor.pieces[0] if tensor.pieces else b""
    return place_of(piece.tensor) if hasattr(piece, "tensor") else None


def _describe(saved: Tensor | None, now: Tensor | None) -> str:
    if saved is None or now is None:
        return "comes back as a different kind of value, or no longer shares its memory with another one"
    was, comes = (f"{each.dtype} of shape {each.shape}" for each in (saved, now))
    if was != comes:
        return f"is {was}, and comes back as {comes}"
    if (shard_of(saved) is None) != (shard_of(now) is None):
        return "comes back sharded in another way"
    return "comes back with different elements"


def _describe_kinds(own: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes of the containers in the states of optimizers and schedulers, by name."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [("optimizer", own["optimizer"]), ("schedulers", own["schedulers"])]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, PLAIN):
            continue
        found[name] = type(value).__qualname__
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        waiting += [(f"{name}.{key}", each) for key, each in items]
    return found


def _compare_kinds(kinds: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    names = sorted(name for name in kinds.keys() & now.keys() if kinds[name] != now[name])
    return {name: f"is a {kinds[name]}, and comes back as a {now[name]}" for name in names}


def _differs(name: str, how: str, owner: type | None) -> StateError:
    return StateError(f"a resume would not restore {name} exactly: it {how}", hint=_advise(owner))


def _advise(owner: type | None) -> str:
    if owner is not None:
        return f"load_state_dict of {owner.__qualname__} has to restore all values that its state_dict returns"
    return "keep the value in another form, such as a plain tensor, or a list or a dict of tensors and numbers"
