"""The gradients that a step of a user's own loop keeps for the next step, as an object with a state."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from holdfast.errors import RecipeError
from holdfast.state import is_sharded, lay_as, local_of
from holdfast.training.backward_passes import BackwardPasses
from holdfast.training.optimizers import complete_hooks, list_stepped, parts_of, read_rates
from holdfast.training.unsynced import capture_unsynced, restore_unsynced

# How a loop treats gradients after an optimizer's step(). NEW: unknown, because step() wasn't called yet. ONCE:
# unknown, because step() was called only once. SET_TO_NONE: the loop sets gradients to None. LEFT: the loop keeps
# gradients, or sets them to zero in place.
NEW, ONCE, SET_TO_NONE, LEFT = "new", "once", "set to none", "left"

# The version that is noted for a restored gradient which was changed between its optimizer's step() and the checkpoint.
# No real gradient has this version.
CHANGED = -1

# The key, in the state of `Gradients` under the key "", of the gradients that FSDP2 keeps in private attributes.
UNSYNCED = "unsynced"


class Gradients:
    """The gradients that a training step keeps for the next training step.

    An optimizer uses a gradient when its ``step()`` updates the parameter. Most loops then set the gradient to None
    before the next backward pass. Then a checkpoint doesn't contain the gradient. Other loops set gradients to zero in
    place, or never clear them: their next training step depends on the gradients. At an optimizer's second call of
    ``step()`` the gradients show what the loop does. Before that call, and for loops that don't set gradients to None,
    checkpoints contain all gradients that the optimizer uses.

    A look at every gradient costs more than the rest of a step's record if the model has many tensors. So once each
    optimizer is known to set gradients to None, and to step after a training step's last backward pass, a training step
    looks at one gradient of each optimizer and at the number of backward passes. If a backward pass has followed
    ``step()`` after all, a save contains the gradients.

    Attributes:
        looks_at_all: whether to look at every gradient in the training step in progress.
        lrs: the learning rates of all groups at the training step's first call of an optimizer's ``step()``; None
            before this call.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, modules: Mapping[str, nn.Module] | None = None,
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            modules, optimizers: the modules and optimizers in kept containers, by name.
        """
        self._model, self._optimizer = model, optimizer
        self._modules, self._inner = modules or {}, optimizers or {}
        self.lrs: list[float] | None = None
        self.looks_at_all = True
        self._parts = [*parts_of(optimizer), *self._inner.values()]
        self._ways = [NEW] * len(self._parts)
        self._stepping: set[int] = set()  # the optimizers whose step() was called during this training step
        # By parameter: the gradient that the last step() of its optimizer used, and the gradient's version at that
        # time.
        self._taken: dict[int, tuple[TensorWeakRef, int]] = {}
        # By optimizer: a parameter that had a gradient when all were looked at; the number of backward passes at the
        # last step(); and whether all gradients were looked at then.
        self._samples: list[Tensor | None] = [None] * len(self._parts)
        self._passes = [0] * len(self._parts)
        self._are_noted = [True] * len(self._parts)
        self._backward = BackwardPasses()
        self._is_regular = True  # whether every optimizer has stepped after the last backward pass of each step so far
        for number, part in enumerate(self._parts):
            complete_hooks(part)
            part.register_step_pre_hook(functools.partial(self._note, number))
            part.register_step_post_hook(functools.partial(self._take, number))

    def _note(self, number: int, *_: object) -> None:
        """Find out whether the loop has cleared the gradients since the last ``step()``.

        This hook is called before ``step()``.
        """
        if self.lrs is None and number < len(self._parts) - len(self._inner):
            self.lrs = read_rates(self._optimizer)
        way = self._ways[number]
        if way in (NEW, LEFT):
            return
        # Once it is known what the loop does, check one gradient only, because this runs in every training step.
        if any(map(self._is_same, list_stepped(self._parts[number]) if way == ONCE else self._sample(number))):
            self._ways[number] = LEFT
        elif way == ONCE:
            self._ways[number] = SET_TO_NONE

    def _sample(self, number: int) -> list[Tensor]:
        """Return one parameter of an optimizer, if possible one that had a gradient; empty if there is none."""
        sample = self._samples[number]
        if sample is None:
            sample = next((each for group in self._parts[number].param_groups for each in group["params"]), None)
        return [] if sample is None else [sample]

    def _take(self, number: int, *_: object) -> None:
        self._stepping.add(number)
        self._passes[number] = self._backward.count()
        are_noted = not self._is_regular or self.looks_at_all or {*self._ways} != {SET_TO_NONE}
        looked_at = list_stepped(self._parts[number]) if are_noted else self._sample(number)
        if are_noted:
            self._samples[number] = next((each for each in looked_at if each.grad is not None), None)
        self._are_noted[number] = are_noted
        for each in looked_at:
            self._note_taken(each)
        if self._ways[number] == NEW:
            self._ways[number] = ONCE

    def _note_taken(self, parameter: Tensor, is_unchanged: bool = True) -> None:
        gradient = parameter.grad
        if gradient is None:
            self._taken.pop(id(parameter), None)
        else:
            self._taken[id(parameter)] = TensorWeakRef(gradient), _version_of(gradient) if is_unchanged else CHANGED

    def _is_same(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is the tensor that the last ``step()`` used; its values may differ."""
        taken = self._taken.get(id(parameter))
        return taken is not None and parameter.grad is not None and taken[0]() is parameter.grad

    def _is_taken(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is the tensor that the last ``step()`` used, unchanged since then."""
        return self._is_same(parameter) and self._taken[id(parameter)][1] == _version_of(parameter.grad)

    def end_step(self) -> list[float] | None:
        """Find out whether the loop has kept gradients in this training step. Return `lrs`, and reset `lrs` to None."""
        for number, part in enumerate(self._parts):
            if self._ways[number] not in (NEW, LEFT) and number not in self._stepping:
                looked_at = list_stepped(part) if self._are_noted[number] else self._sample(number)
                if any(self._is_same(each) and not self._is_taken(each) for each in looked_at):
                    self._ways[number] = LEFT
        if len(self._stepping) < len(self._parts):
            self._is_regular = False
        elif self._is_regular and self.looks_at_all:
            self._is_regular = {*self._passes} == {self._backward.count()}
        self._stepping.clear()
        lrs, self.lrs = self.lrs, None
        return lrs

    def clear(self) -> None:
        """Set all gradients to None.

        Raises:
            RecipeError: there is a gradient that no optimizer's ``step()`` has used.
        """
        self._is_regular = False  # from now on each step looks at all gradients, because each step asks here
        if any(each.grad is not None and not self._is_taken(each) for _, each in self._list_parameters()):
            raise RecipeError(
                "step.shares() would clear gradients that no optimizer has used: the step before called no "
                "optimizer's step()",
                hint="step the optimizer in every step; run.batches(..., grad_accum=N) makes steps of N batches",
            )
        for _, each in self._list_parameters():
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return, by parameter name, the gradients on which the next training step may depend.

        The key "" records how the loop clears gradients, and has the gradients that FSDP2 hasn't synced. The key is
        missing if the loop sets all gradients to None.
        """
        found: dict[str, Any] = {}
        used = self._find_used()
        taken: dict[str, bool] = {}  # by parameter name: whether the gradient is unchanged since its optimizer's step()
        settled = {
            id(each)
            for way, part in zip(self._ways, self._parts, strict=True)
            if way == SET_TO_NONE
            for each in list_stepped(part)
        }
        for name, each in self._list_all():
            if each.grad is None or id(each) in used or (self._is_taken(each) and id(each) in settled):
                continue
            found[name] = _pack(each.grad)
            if self._is_same(each):
                taken[name] = self._is_taken(each)
        unsynced = capture_unsynced(self._model)
        if taken or unsynced or set(self._ways) != {SET_TO_NONE}:
            found[""] = {"taken": dict(sorted(taken.items())), "ways": self._ways[:]}
            found[""] |= {UNSYNCED: unsynced} if unsynced else {}
        return dict(sorted(found.items()))

    def _find_used(self) -> set[int]:
        """Return the parameters, by id, whose gradient the last ``step()`` has used, without a look at each gradient.

        These are the parameters of optimizers after whose ``step()`` no backward pass has begun.
        """
        if all(self._are_noted):
            return set()
        count = self._backward.count()
        return {
            id(each)
            for number, part in enumerate(self._parts)
            if not self._are_noted[number] and self._passes[number] == count
            if any(map(self._is_taken, self._sample(number)))
            for each in list_stepped(part)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = state.get("", {"taken": {}, "ways": [SET_TO_NONE] * len(self._parts)})
        # Earlier checkpoints don't record the optimizers in containers.
        ways = list(known["ways"])
        self._ways, self._taken = ways + [NEW] * (len(self._parts) - len(ways)), {}
        self._are_noted = [True] * len(self._parts)
        for name, each in self._list_all():
            each.grad = _unpack(state[name], each) if name in state else None
            if name in known["taken"]:
                self._note_taken(each, known["taken"][name])
        restore_unsynced(self._model, known.get(UNSYNCED, {}))

    def _list_all(self) -> list[tuple[str, Tensor]]:
        """Return the parameters of `_list_parameters`, and those in kept containers, each with its name."""
        found = self._list_parameters()
        known = {id(each) for _, each in found}
        inner: list[tuple[str, Tensor]] = [
            named for name, module in self._modules.items() for named in module.named_parameters(prefix=name)
        ]
        inner += [
            (f"{name}.{number}", each)
            for name, optimizer in self._inner.items()
            for number, each in enumerate(list_stepped(optimizer))
        ]
        for name, each in inner:
            if id(each) not in known:
                known.add(id(each))
                found.append((name, each))
        return found

    def _list_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the model's parameters, and all other parameters that the optimizers step, each with its name."""
        found: list[tuple[str, Tensor]] = [*self._model.named_parameters()]
        known = {id(each) for _, each in found}
        for number, group in enumerate(self._optimizer.param_groups):
            for place, each in enumerate(group["params"]):
                if id(each) not in known:
                    found.append((f"{number}.{place}", each))
        return found


def _pack(gradient: Tensor) -> Any:
    """Return a gradient in the form for a checkpoint: itself, or for a sparse gradient a dict of indices and values."""
    if gradient.layout is not torch.sparse_coo:
        return gradient
    return {
        "indices": gradient._indices(), "values": gradient._values(), "shape": [*gradient.shape],
        "is_coalesced": gradient.is_coalesced(),
    }  # fmt: skip


def _unpack(saved: Any, parameter: Tensor) -> Tensor:
    if isinstance(saved, Tensor):
        gradient = saved.to(parameter.device)
        return gradient if is_sharded(gradient) or is_sharded(parameter) else lay_as(gradient, parameter)
    return torch.sparse_coo_tensor(
        saved["indices"], saved["values"], saved["shape"], is_coalesced=saved["is_coalesced"], check_invariants=False
    ).to(parameter.device)


def _version_of(gradient: Any) -> int:
    """Return a number that grows with each change of a gradient in place."""
    version: int = (local_of(gradient) if is_sharded(gradient) else gradient)._version
    return version
