"""Check, before the first step and before each commit, that the state can be saved and restored.

Without these checks an error would show only at a save after hours of training, or at a resume. The checks compare
names, shapes and encodings. They copy only tensors of modules whose own code loads their ``state_dict``.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from holdfast import state
from holdfast.checkpoint import Payload
from holdfast.errors import RecipeError, StateError, Unhealthy
from holdfast.provenance.location import find_place
from holdfast.state.tensor_forms import is_sharded, place_of, shard_of
from holdfast.training.build import Training
from holdfast.training.capturing import capture_own, fitted
from holdfast.training.checksums import describe_components
from holdfast.training.division import find_division, make_division
from holdfast.training.examinations import examine_parameter, find_outside_copies
from holdfast.training.flags import check_flags
from holdfast.training.naming import name_parameters
from holdfast.training.optimizers import list_stepped
from holdfast.training.round_trip import MOST_TRIED_BYTES, check_round_trip
from holdfast.training.structure import has_own_loading

LOADS = "the model's hooks, or its own load_state_dict, have to load everything that its state_dict returns"


def check_step(training: Training) -> None:
    """Check after a step that a resume could restore the state. After the first step, also check that a save works.

    Raises:
        RecipeError: a value couldn't be saved or restored.
    """
    check_changes(training)
    # before the first step the optimizers have no moments, and the data has no position
    if training.progress.step == 1:
        check_savable(training, "after the first step", {"data": training.batches.state_dict()})
        check_same_ranks(training)


def check_changes(training: Training) -> None:
    """Check that no step has made a change that a resume couldn't make again.

    It may be a change to layers, tensors, groups, torch's settings or the variables of a loop. This looks at each
    tensor, so it isn't called in every step: see `StepRecord.is_watched`.

    Raises:
        RecipeError: a step has made such a change.
        DeterminismError: in strict mode, a step has changed one of torch's settings.
    """
    check_flags(training.config.determinism, training.as_built.flags, training.progress.step)
    training.record.check_variables()
    is_changed = training.as_built.structure.check(training.progress.step)
    training.as_built.grouping.check(training.progress.step, is_looked_at=is_changed)
    training.record.checked = training.progress.step


def check_same_ranks(training: Training) -> None:
    """Raise an error if the ranks' weights differ, because a checkpoint contains only the main rank's weights.

    A loop may average gradients with its own code, so whether the weights stay equal shows only after a step. For the
    stages of a pipeline, `check_replicas` compares the tensors that several ranks hold.

    Raises:
        RecipeError: the weights differ after the first step.
        Unhealthy: the weights differ after a later step. A machine may have computed wrongly, so new ranks train the
            steps since the last commit again.
    """
    if training.ranks.stages is not None:
        return
    is_common = training.recipe.loss is None or training.ranks.has_common_state
    if not training.ranks.has_others or not is_common:
        return
    sums = training.ranks.gather(describe_components(training, in_detail=False))
    step, advice = training.progress.step, training.program.advice
    for name, means, hint in (
        ("model", ": each rank trains a different model", advice.model),
        ("optimizer", "", advice.optimizer),
    ):
        found = [{key: value for key, value in each.items() if key.partition(".")[0] == name} for each in sums]
        if all(each == found[0] for each in found):
            continue
        if step == 1:
            raise RecipeError(f"after step {step} the ranks have different values of the {name}{means}", hint=hint)
        raise Unhealthy(
            f"after step {step} {_describe_odd(name, found)}, although they were equal before; nothing was saved",
            hint=f"if this happens again, but only on this machine, the machine computes wrongly; otherwise: {hint}",
            step=step,
        )


def _describe_odd(name: str, found: Sequence[dict[str, Any]]) -> str:
    """Return a text for an error: the ranks whose model or optimizer differs from the majority of ranks."""
    most = max(found, key=found.count)
    odd = [str(rank) for rank, each in enumerate(found) if each != most]
    if 2 * len(odd) >= len(found):
        return f"the ranks have different values of the {name}"
    return f"the {name} of rank {', '.join(odd)} differs from the values of the other ranks"


def check_beginning(training: Training) -> None:
    """Check before the first step that the state can be saved and restored, and note what no checkpoint will contain.

    Raises:
        RecipeError: a value can't be saved or restored; all ranks raise it.
    """
    check_savable(training, "before the first step")
    training.record.unkept = find_outside_copies(training.recipe)


def check_savable(training: Training, moment: str, others: dict[str, Any] | None = None) -> None:
    """Encode the state as a save does, without copies of its tensors, and check that a resume would restore all of it.

    Args:
        moment: the time of the check, as the beginning of an error's message.
        others: further components of the state, by name.

    Raises:
        RecipeError: a value can't be saved or restored; all ranks raise it.
    """
    problem, common = None, Payload({}, None)
    if not any(map(is_lazy, training.recipe.model.parameters())):
        try:
            common = _try(training, others or {})
        except (RecipeError, StateError) as error:
            problem = error.message, error.hint
    found = next(filter(None, training.ranks.gather(problem)), None) or _find_other_tensors(training, common)
    if found is None and training.ranks.has_others:
        try:
            _check_copies(training, common)
        except StateError as error:
            found = error.message, error.hint
    if found is not None:
        raise RecipeError(f"{find_place()}{moment}: {found[0]}", hint=found[1])


def _check_copies(training: Training, common: Payload) -> None:
    """Raise StateError in all ranks if several ranks hold different values of one tensor, or of one row of a tensor."""
    if (division := find_division(training, common)) is not None:
        division.check_copies(common)
    elif training.recipe.has_own_loop and training.ranks.has_groups:
        # Before the first step, stages of a pipeline look like replicas if their layers have the same names. The error
        # of this check names such layers.
        make_division(training).check_groups(common)


def _find_other_tensors(training: Training, payload: Payload) -> tuple[str, str] | None:
    """Return an error's message and hint if the names, shapes or kinds of the ranks' tensors differ; otherwise None.

    In a pipeline the names may differ, because each stage has its own layers.
    """
    own = {name: (each.shape, shard_of(each) is not None) for name, each in sorted(payload.tensors.items())}
    digests = training.ranks.gather(hashlib.sha256(repr(own).encode()).hexdigest())
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), 0)
    if not other:
        return None
    found = training.ranks.gather(own)
    if training.ranks.stages is None:
        one, two = found[0], found[other]
        name = min(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        return _describe_other(name, {0: one, other: two})
    holders: dict[str, int] = {}
    for rank, each in enumerate(found):
        for name, form in each.items():
            first = holders.setdefault(name, rank)
            if found[first][name] != form:
                return _describe_other(name, {first: found[first], rank: each})
    return None


def _describe_other(name: str, held: dict[int, dict[str, Any]]) -> tuple[str, str]:
    """Return an error's message and hint about a tensor that two ranks hold in different forms.

    Args:
        held: by rank and name, each tensor's shape, and whether the tensor is sharded.
    """
    has = [f"of shape {each[name][0]}" if name in each else "not there" for each in held.values()]
    if has[0] == has[1]:
        has = ["sharded" if each[name][1] else "whole" for each in held.values()]
    first, second = held
    return (
        f"{name} is {has[0]} in rank {first} and {has[1]} in rank {second}: a checkpoint has one tensor of each name",
        "divide layers or experts as DTensors over a mesh, or as stages of a pipeline: holdfast docs layouts",
    )


def _try(training: Training, others: dict[str, Any]) -> Payload:
    """Encode the state. Return the payload of the components that all ranks have in common: model and optimizer.

    The payload is empty if a user's ``state_dict`` doesn't work yet.
    """
    try:
        own = capture_own(training)
    except (RecipeError, StateError):
        raise
    except Exception:  # a user's state_dict may work only after the first step
        if training.progress.step:
            raise
        return Payload({}, None)
    payload = state.to_payload(own | others)
    tensors = {name: each for name, each in payload.tensors.items() if name.startswith(("model.", "optimizer."))}
    common = Payload(tensors, payload.tree)
    if training.ranks.stages is not None and (cut := next(filter(None, map(_name_cut, own["extras"].items())), "")):
        raise RecipeError(
            f"{cut} is sharded, but each rank has its own stage of a pipeline: a checkpoint can't contain both",
            hint="besides the stages of a pipeline, keep only unsharded tensors: holdfast docs layouts",
        )
    model = training.recipe.model
    division = find_division(training, common)
    if division is not None and (name := division.find_unplaced(common)):
        raise RecipeError(
            f"the optimizer's state {name} is sharded over the ranks differently than its parameter, so a resume "
            "couldn't shard it again",
            hint="use an optimizer whose state has the shapes of its parameters, such as AdamW",
        )
    is_own = has_own_loading(model)
    check_round_trip(training, own, payload)
    _check_stepped(training, payload, {*own["model"]} if is_own else set())
    if is_own and not training.progress.step:
        _try_to_load(model, own["model"])
    return common


def _name_cut(extra: tuple[str, Any]) -> str:
    """Return the name of a sharded tensor in an extra's state; empty if no tensor of the state is sharded."""
    name, own = extra
    tensors = state.to_payload({name: own}).tensors
    return next((each for each, tensor in tensors.items() if shard_of(tensor) is not None), "")


def _check_stepped(training: Training, payload: Payload, names: set[str]) -> None:
    """Raise RecipeError if an optimizer steps a parameter that the state doesn't contain.

    Args:
        names: the names in a model's ``state_dict``; needed if the model's own code may have copied the tensors.
    """
    pieces = [piece for each in payload.tensors.values() for piece in each.pieces]
    places = {place_of(each.tensor) for each in pieces if hasattr(each, "tensor")}
    for name, each in zip(name_parameters(training), list_stepped(training.optimizer), strict=True):
        if each.numel() and name not in names and place_of(each) not in places:
            raise RecipeError(
                f"an optimizer steps {name}, of shape {tuple(each.shape)}, and no saved object has this parameter",
                hint=_find_hint(training, each),
            )


def _find_hint(training: Training, parameter: Tensor) -> str:
    holder = examine_parameter(training.recipe, parameter)
    if holder is not None:
        return f"the parameter belongs to {holder}: {holder.remedy}"
    return training.program.advice.saved


def _try_to_load(model: nn.Module, captured: dict[str, Any]) -> None:
    """Change one number of each tensor, load a copy of the state into the model, and compare.

    Raises:
        StateError: the model's own code can't load the state, or doesn't load all of it.
    """
    tensors = {name: each for name, each in captured.items() if isinstance(each, Tensor)}
    if any(map(is_sharded, tensors.values())) or sum(each.nbytes for each in tensors.values()) > MOST_TRIED_BYTES:
        return
    saved = state.from_payload(state.to_payload(captured))
    live = {place_of(each): each.detach() for each in tensors.values() if each.numel()}
    before = {place: each.flatten()[:1].clone() for place, each in live.items()}
    try:
        with torch.no_grad():
            for each in live.values():
                each[(0,) * each.dim()] = each.flatten()[0] == 0
        with fitted(model, saved):
            _load(model, saved)
        now = model.state_dict()
        lost = [name for name, each in saved.items() if isinstance(each, Tensor) and not _is_equal(each, now.get(name))]
        if lost:
            raise StateError(
                f"the model's load_state_dict doesn't restore {lost[0]} as its state_dict has saved it", hint=LOADS
            )
    except BaseException:
        with torch.no_grad():
            for place, each in live.items():
                each[(0,) * each.dim()] = before[place][0]
        raise


def _load(model: nn.Module, saved: dict[str, Any]) -> None:
    try:
        model.load_state_dict(saved)
    except (KeyError, IndexError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise StateError(
            f"the model's load_state_dict doesn't accept the model's own state_dict: {type(error).__name__}: {text}",
            hint=LOADS,
        ) from error


def _is_equal(saved: Tensor, now: Any) -> bool:
    if not isinstance(now, Tensor) or now.shape != saved.shape or now.dtype != saved.dtype:
        return False
    return torch.equal(
        saved.contiguous().view(-1).view(torch.uint8), now.detach().cpu().contiguous().view(-1).view(torch.uint8)
    )
