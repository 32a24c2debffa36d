"""Capture everything in a `Training` that its next step depends on, and restore this state in the right order."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from holdfast.checkpoint import Payload
from holdfast.errors import RecipeError, StateError
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Place
from holdfast.state import copy_to_host, from_payload, has_shards, is_sharded, lies_by_rows, strides_of, to_payload
from holdfast.state.layout import index_once, is_expanded
from holdfast.state.optimizers import loading_exactly, refill
from holdfast.training.adalora import ALLOCATORS
from holdfast.training.build import Training
from holdfast.training.division import find_division
from holdfast.training.elastic import DATA_RANKS, digest_state, restore_generators, take_extras
from holdfast.training.naming import name_parameters, numbered_state, optimizer_state
from holdfast.training.optimizers import lay_out_state, list_members, parts_of

# The words of an error about a state that an object can't load.
UNFIT = "doesn't fit what the recipe built"


def capture(training: Training) -> dict[str, Any]:
    """Return everything that the next step depends on, by component.

    The tensors are the training's own, not copies. Only the main rank has the extras of all ranks, if they differ and
    the main rank writes the whole checkpoint; each other rank has only its own. All ranks call it together.
    """
    own, ranks = capture_own(training), training.ranks
    captured = own | {
        "extras": _of_each_rank(training, own["extras"], "extras", own),
        "rng": _of_each_rank(training, training.generators.state_dict(), "rng"),
        "data": _of_each_rank(training, training.batches.state_dict(), "data"),
        "progress": training.progress.state_dict(),
        "built": training.as_built.hyperparameters,
    }
    has_own = ranks.has_groups and not ranks.has_common_state
    return captured | ({DATA_RANKS: [*ranks.data.numbers]} if has_own else {})


def await_device(training: Training) -> None:
    """Wait for the work that the program has queued on this rank's GPU, on all streams.

    A read of the state is ordered only after the work on the current stream. Without this wait the read could see
    half of a copy: a copy on another stream, such as an average of the weights, or a ``non_blocking`` copy to a tensor
    on the CPU; the checkpoint would then contain these half-copied bytes.
    """
    if training.accelerator.device.type != "cpu":
        heartbeats.mark(Place.DEVICE)
        torch.accelerator.synchronize()
        heartbeats.mark(Place.COMPUTING)


def capture_own(training: Training) -> dict[str, Any]:
    """Return the state that a step changes in this rank, by component. A rank can call this without the other ranks."""
    await_device(training)
    scaler = training.accelerator.scaler
    return {
        "model": training.recipe.model.state_dict(),
        "optimizer": optimizer_state(training),
        "schedulers": [scheduler.state_dict() for scheduler in training.schedulers],
        "scaler": scaler.state_dict() if scaler else None,
        "extras": capture_extras(training),
    }


def capture_extras(training: Training) -> dict[str, Any]:
    """Return the state of each registered extra, by name."""
    return {name: extra.state_dict() for name, extra in sorted(training.recipe.extras.items())}


def copy_extras(training: Training) -> Callable[[], None]:
    """Copy the state of all extras into the host's memory. Return a function that restores it."""
    take = copy_to_host(capture_extras(training))

    def put_back() -> None:
        for name, extra in training.recipe.extras.items():
            extra.load_state_dict(take(name))  # one after the other, so that a GPU has one extra's copy at a time

    return put_back


def _of_each_rank(training: Training, state: Any, name: str, own: dict[str, Any] | None = None) -> list[Any]:
    """Return the states of all ranks, by rank; only one state if all ranks have equal states.

    Args:
        state: this rank's state of a component.
        name: the component's name.
        own: this rank's whole state. If no tensor in it is sharded, only the main rank gets the states of all ranks.

    Raises:
        RecipeError: ranks that must have a common state have different states.
    """
    if not training.ranks.has_others:
        return [state]
    if not training.ranks.has_common_state and name != "extras":
        return training.ranks.gather(state)
    # Shards aren't compared: they differ between the ranks, because each is a part of one extra.
    cut = {key: each for key, each in state.items() if has_shards(to_payload(each))} if name == "extras" else {}
    if cut:
        others = {key: each for key, each in state.items() if key not in cut}
        return [each | cut for each in _of_each_rank(training, others, name)]  # each rank writes a part of the extras
    if len(set(training.ranks.gather(digest_state(name, state)))) == 1:
        return [state]
    if training.ranks.has_common_state:
        raise RecipeError(
            f"after step {training.progress.step} the ranks have different {name}, because code that trains only a "
            "share of a batch has changed them",
            hint=training.program.advice.shares,
        )
    is_divided = own is None or find_division(training, to_payload(own)) is not None
    return training.ranks.gather(state) if is_divided else training.ranks.gather_in_main(state)


def decode(payload: Payload) -> dict[str, Any]:
    """Return the state that `capture` returned, from a checkpoint's payload.

    The model's tensors are views of the payload's memory; ``load_state_dict`` copies them later. A caller that keeps
    one of these tensors also keeps the payload's memory in use; see `memory.Buffers.lend`.
    """
    state: dict[str, Any] = from_payload(payload, lent=["model"])
    return state


def restore(training: Training, state: dict[str, Any]) -> None:
    """Restore the state that `capture` returned, except for the position in the data.

    The optimizer is restored after everything else that sets learning rates, so that every group's rate is exactly as
    saved.

    Raises:
        StateError: the saved state of a component doesn't fit what the recipe built.
        ConfigError: a different number of ranks saved the state, and the present ranks can't divide the state among
            themselves.
    """
    accelerator = training.accelerator
    try:
        training.as_built.grouping.restore(state["optimizer"])
    except ValueError as error:
        raise _unfit("optimizer", str(error)) from None
    model = training.recipe.model
    # The gate compares the restored state with the payload. So a model whose own loading code might alter the given
    # tensors gets a copy of them.
    weights = state["model"] if only_copies(model) else copy.deepcopy(state["model"])
    # Versions before 0.2 wrote all tensors row by row. So a tensor with other strides shows that a later version wrote
    # the state.
    moments = (
        each for own in state["optimizer"].get("state", {}).values() if isinstance(own, dict) for each in own.values()
    )
    are_laid_out = any(_has_own_layout(each) for each in (*weights.values(), *moments))
    parts: dict[str, tuple[Any, Any]] = {"model": (model, weights)}
    if len(state["schedulers"]) != len(training.schedulers):
        raise _unfit(
            "list of schedulers", f"{len(state['schedulers'])} were saved, and there are {len(training.schedulers)}"
        )
    for number, (scheduler, saved) in enumerate(zip(training.schedulers, state["schedulers"], strict=True)):
        parts[f"scheduler {number}"] = (scheduler, saved)
    parts["scaler"] = (accelerator.scaler, state["scaler"])
    extras = take_extras(training, state)
    if unknown := sorted(extras.keys() - training.recipe.extras.keys()):
        raise _unfit(f"extra {unknown[0]}", "the recipe registers no object of this name")
    # an earlier version, which didn't save these states, wrote the checkpoint: continue without them
    if ALLOCATORS not in extras:
        training.recipe.extras = {name: each for name, each in training.recipe.extras.items() if name != ALLOCATORS}
    for name, extra in training.recipe.extras.items():
        parts[f"extra {name}"] = (extra, extras.get(name))
    parts["progress"] = (training.progress, state["progress"])
    with fitted(model, weights, have_strides=are_laid_out):
        for name, (target, saved) in parts.items():
            read = load_scheduler if name.startswith("scheduler ") else load
            if (target is None) != (saved is None):
                raise _unfit(name, f"the object is missing from {'the checkpoint' if saved is None else 'the recipe'}")
            if target is not None:
                read(name, target, saved)
    load_optimizer(training, state["optimizer"], are_laid_out=are_laid_out)
    for name, extra in training.recipe.extras.items():
        # Such an extra's state contains the optimizer's state in the saved order, and `load_optimizer` has changed the
        # order. So load the extra again.
        if _wraps_optimizer(training, extra):
            load(f"extra {name}", extra, extras.get(name))
    restore_generators(training, state)


@contextlib.contextmanager
def fitted(model: nn.Module, saved: Mapping[str, Any], *, have_strides: bool = False) -> Iterator[None]:
    """Give a model's buffers the shapes and strides of the saved tensors, for the block that loads these tensors.

    A step may have changed a buffer's shape or strides, or have set a buffer that was None. In a tensor from ``expand``
    several elements share memory. During the block each element has memory of its own; after the block the tensor is
    expanded again.

    Args:
        have_strides: whether the tensors were saved with their strides.
    """
    devices = {each.device for each in model.parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            value = saved.get(f"{prefix}.{name}" if prefix else name)
            if not isinstance(value, Tensor) or is_sharded(value) or name in module._non_persistent_buffers_set:
                continue
            is_new = buffer is None or buffer.shape != value.shape
            if is_new or (have_strides and strides_of(buffer) != strides_of(value)):
                device = buffer.device if buffer is not None else next(iter(devices), value.device)
                module._buffers[name] = torch.empty_like(value, device=device)
    tensors = (each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each))
    expanded = [(each, each.stride()) for each in tensors if is_expanded(each)]
    for each, _ in expanded:
        each.data = each.detach().contiguous()
    yield
    for each, strides in expanded:
        once = each.detach()[index_once(strides)]
        if torch.equal(once.expand_as(each), each.detach()):
            each.data = once.clone().expand(each.shape)


def _has_own_layout(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not lies_by_rows(value)


def only_copies(model: nn.Module) -> bool:
    """Return whether only torch's own code loads the model. That code copies the given tensors."""
    return getattr(model.load_state_dict, "__func__", None) is nn.Module.load_state_dict and all(
        type(module)._load_from_state_dict is nn.Module._load_from_state_dict
        and type(module).set_extra_state is nn.Module.set_extra_state
        and not module._load_state_dict_pre_hooks
        for module in model.modules()
    )


def load(name: str, target: Any, saved: Any) -> None:
    """Load a saved state into an object.

    Args:
        name: the object's name in the message of an error.

    Raises:
        StateError: the saved state doesn't fit the object.
        RecipeError: the object's own ``load_state_dict`` raises RecipeError.
    """
    try:
        target.load_state_dict(saved)
    except RecipeError:
        raise  # the error's message already says what to do
    except (KeyError, IndexError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise _unfit(name, f"{type(error).__name__}: {error}") from error


def load_optimizer(training: Training, saved: dict[str, Any], *, are_laid_out: bool) -> None:
    """Load the optimizer's saved state, matching parameters by name.

    Args:
        are_laid_out: whether the tensors were saved with their strides.

    Raises:
        StateError: the saved state doesn't fit the optimizer.
    """
    try:
        numbered = numbered_state(training, saved)
    except ValueError as error:
        raise _unfit("optimizer", str(error)) from None
    with loading_exactly(parts_of(training.recipe.optimizer)):
        load("optimizer", training.optimizer, numbered)
    _check_shards(training)
    lay_out_state(training.recipe.optimizer, are_saved=are_laid_out)


def load_scheduler(name: str, scheduler: Any, saved: Any) -> None:
    """Load a scheduler's saved state. An attribute that was built as a `Counter`, for example, stays one."""
    built = {key: each for key, each in vars(scheduler).items() if isinstance(each, dict) and type(each) is not dict}
    load(name, scheduler, saved)
    for key, each in built.items():
        if type(now := vars(scheduler).get(key)) is dict:
            setattr(scheduler, key, refill(each, now.items()))


def _wraps_optimizer(training: Training, extra: Any) -> bool:
    """Return whether an extra has an optimizer of the training as an attribute, and so may save its state."""
    parts = {id(part) for part in parts_of(training.recipe.optimizer)}
    is_own = type(extra).__module__.startswith("holdfast.")
    return not is_own and any(id(value) in parts for value in getattr(extra, "__dict__", {}).values())


def _check_shards(training: Training) -> None:
    """Raise StateError if an optimizer's restored state of a sharded parameter isn't sharded as the parameter is."""
    members: list[tuple[Any, Any]] = list_members(training.recipe.optimizer)
    for name, (part, parameter) in zip(name_parameters(training), members, strict=True):
        for key, value in part.state.get(parameter, {}).items() if is_sharded(parameter) else ():
            is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_alike and not (is_sharded(value) and value.placements == parameter.placements):
                raise _unfit("optimizer", f"{key} of {name} isn't sharded over the ranks as the parameter is")


def _unfit(name: str, reason: str) -> StateError:
    return StateError(
        f"the saved {name} {UNFIT}: {reason}",
        hint="the recipe's code has changed since the checkpoint was written",
    )
