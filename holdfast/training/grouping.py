"""The changes that steps make to parameter groups and frozen parameters, and the restore of these changes.

Gradual unfreezing adds a parameter group in a step; other programs move parameters between groups. A checkpoint lists
each new group by the names of its parameters. A resume creates the same groups before it loads their state.
"""

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.errors import RecipeError
from holdfast.provenance.fingerprint import canonical_json
from holdfast.provenance.location import find_place
from holdfast.recipe import Recipe
from holdfast.training.optimizers import list_stepped, parts_of

# Keys of a saved optimizer state: REGROUPED is present if a step has changed the groups, and FROZEN if a recipe's steps
# have frozen or unfrozen parameters. (For a loop, `modes.Modes` saves the frozen parameters.)
REGROUPED, FROZEN = "regrouped", "frozen"


class Grouping:
    """The parameter groups and the frozen parameters as the recipe built them."""

    def __init__(self, recipe: Recipe, advice: str, contained: Mapping[str, Any]) -> None:
        """
        Args:
            advice: the hint for the error about a parameter that was added after the first step.
            contained: the modules and optimizers in kept containers, by name.
        """
        self._recipe, self._advice = recipe, advice
        self._parts = [[[*group["params"]] for group in each.param_groups] for each in parts_of(recipe.optimizer)]
        of_modules = {id(each): name for name, each in reversed(_list_named(recipe))}
        groups = [group for part in self._parts for group in part]
        self._own_names = {
            id(each): f"{number}.{place}"
            for number, group in enumerate(groups)
            for place, each in enumerate(group)
            if id(each) not in of_modules
        }
        self._frozen = list_frozen(recipe.model)
        known = self.name_known()
        self._names = [sorted(known[id(each)] for each in group) for group in groups]
        self._built_counts = self._count()
        self._seen = list_stepped(recipe.optimizer), self._built_counts
        self._inner = {name: each for name, each in contained.items() if isinstance(each, torch.optim.Optimizer)}
        self._inner_groups = {name: _list_groups(each) for name, each in self._inner.items()}

    def name_known(self) -> dict[int, str]:
        """Return, by parameter id, the names of the parameters that a resumed process can find again.

        A parameter of the model is named ``layer.weight``, and a registered module's ``extras.critic.weight``. Any
        other parameter is named by its place in the optimizer as built: ``0.3`` is the fourth parameter of the first
        group.
        """
        return self._own_names | {id(each): name for name, each in reversed(_list_named(self._recipe))}

    def describe(self, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return, for a checkpoint, the changes of groups and frozen parameters since the recipe was built, if any.

        Args:
            groups: the present names of each group's parameters.
        """
        found: dict[str, Any] = {}
        if self._count() != self._built_counts or not all(map(self.is_built, range(len(groups)), groups)):
            found[REGROUPED] = {"groups": self._count(), "built": self._digest()}
        if not self._recipe.has_own_loop and (frozen := list_frozen(self._recipe.model)) != self._frozen:
            found[FROZEN] = frozen
        return found

    def is_built(self, number: int, names: Sequence[str]) -> bool:
        """Return whether a group has the same parameters, in any order, as the built group with this number."""
        return number < len(self._names) and sorted(names) == self._names[number]

    def check(self, step: int, *, is_looked_at: bool) -> None:
        """Raise RecipeError if a step has given an optimizer a parameter that a resumed process couldn't find.

        Args:
            step: the step that was trained last.
            is_looked_at: whether to check again even if no optimizer's parameters have changed since the last call.
        """
        self._check_inner(step)
        now, counts = list_stepped(self._recipe.optimizer), self._count()
        is_same = counts == self._seen[1] and len(now) == len(self._seen[0]) and all(map(_is_same, now, self._seen[0]))
        if is_same and not is_looked_at:
            return
        self._seen = now, counts
        known = self.name_known()
        where = f"{find_place()}after step {step} an optimizer has a"
        if lost := [each for each in now if id(each) not in known]:
            raise RecipeError(
                f"{where} parameter of shape {tuple(lost[0].shape)} that was not there before the first step and is in "
                "no saved module: a resume couldn't find the parameter",
                hint=self._advice,
            )
        for part in parts_of(self._recipe.optimizer):
            stepped = {id(each) for each in list_stepped(part)}
            states = (each for each in part.state if isinstance(each, torch.Tensor))
            left = sorted(known.get(id(each), "a tensor") for each in states if id(each) not in stepped)
            if left:
                raise RecipeError(
                    f"{where} state of {left[0]}, which it doesn't step any more: torch can't save that state",
                    hint="when you remove the parameter from the optimizer, del optimizer.state[parameter] as well",
                )

    def _check_inner(self, step: int) -> None:
        """Raise RecipeError if a step has changed the groups of an optimizer in a kept container.

        The state of such an optimizer doesn't name its parameters, so a resume couldn't create the groups again.
        """
        for name, each in self._inner.items():
            now, built = _list_groups(each), self._inner_groups[name]
            if len(now) != len(built) or not all(map(_has_same, now, built)):
                raise RecipeError(
                    f"{find_place()}after step {step} {name} has different parameter groups than when the loop began: "
                    "the state of an optimizer in a container doesn't name its parameters, so a resume couldn't find "
                    "them",
                    hint="keep the optimizer, and the module with its parameters, under names of their own: "
                    "run.keep(model=model, optimizer=optimizer)",
                )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the optimizers' groups and the ``requires_grad`` of a recipe's parameters from a saved state.

        Args:
            saved: the optimizer's state in a checkpoint.

        Raises:
            ValueError: steps had changed the groups before the save, and the recipe now builds different groups; or a
                saved parameter is missing now.
        """
        if not self._recipe.has_own_loop:
            freeze(self._recipe.model, {*saved.get(FROZEN, self._frozen)})
        mark = saved.get(REGROUPED)
        parts = parts_of(self._recipe.optimizer)
        if mark is None:
            for part, members in zip(parts, self._parts, strict=True):
                _regroup(part, members, [{}] * len(members))
            return
        if mark["built"] != self._digest() or len(mark["groups"]) != len(parts):
            raise ValueError(
                "a step had changed the optimizer's parameter groups, and the recipe now builds different groups"
            )
        numbered = enumerate(saved["param_groups"])
        for part, count in zip(parts, mark["groups"], strict=True):
            own = list(itertools.islice(numbered, count))
            found = [self._find(number, group["params"]) for number, group in own]
            _regroup(part, found, [group for _, group in own])

    def _find(self, number: int, names: Sequence[str]) -> list[nn.Parameter]:
        """Return the parameters of a saved group, in the saved order.

        If a step hasn't changed the group, return its parameters in the order in which the recipe builds them.
        """
        if self.is_built(number, names):
            return [group for part in self._parts for group in part][number]
        built = [each for part in self._parts for group in part for each in group]
        known = {self._own_names[id(each)]: each for each in built if id(each) in self._own_names}
        known |= dict(_list_named(self._recipe))
        if lost := [name for name in names if name not in known]:
            raise ValueError(f"the saved optimizer has the parameter {lost[0]}, which is missing now")
        return [known[name] for name in names]

    def _count(self) -> list[int]:
        return [len(part.param_groups) for part in parts_of(self._recipe.optimizer)]

    def _digest(self) -> str:
        """Return a digest of the groups as the recipe built them."""
        return hashlib.sha256(canonical_json([self._built_counts, self._names])).hexdigest()[:16]


def list_frozen(model: nn.Module) -> list[str]:
    """Return the names of a model's frozen parameters, sorted."""
    return sorted(name for name, each in model.named_parameters() if not each.requires_grad)


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters of these names, and unfreeze all others."""
    for name, each in model.named_parameters():
        if each.requires_grad == (name in names):
            each.requires_grad_(name not in names)


def _list_named(recipe: Recipe) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the model and of registered modules, by name; a tied parameter under its first name."""
    modules: dict[str, Any] = {"": recipe.model}
    modules |= {f"extras.{name}.": each for name, each in sorted(recipe.extras.items())}
    return [
        (f"{prefix}{name}", parameter)
        for prefix, module in modules.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    ]


def _list_groups(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    return [[*group["params"]] for group in optimizer.param_groups]


def _has_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: object, other: object) -> bool:
    return one is other


def _regroup(part: torch.optim.Optimizer, wanted: Sequence[Sequence[Any]], saved: Sequence[Any]) -> None:
    """Replace the parameter groups of an optimizer.

    Args:
        wanted: the parameters of each group.
        saved: the saved groups; a new group gets its hyperparameters from the saved group.
    """
    for group, members in zip(part.param_groups, wanted, strict=False):
        if len(group["params"]) != len(members) or not all(map(_is_same, group["params"], members)):
            group["params"] = [*members]
    del part.param_groups[len(wanted) :]
    for members, group in list(zip(wanted, saved, strict=True))[len(part.param_groups) :]:
        part.add_param_group({**group, "params": [*members]})
