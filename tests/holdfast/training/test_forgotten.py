"""The search finds unregistered state that a recipe's functions can reach, and nothing else."""

import copy
import dataclasses
import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from holdfast import Recipe
from holdfast.training import Unregistered, find_unregistered
from tests.support import careless, varied
from tests.support.careless import fit, make, net
from tests.support.toy import toy
from tests.support.varied import Average

GLOBAL = nn.Linear(3, 3)


def names(recipe: Recipe) -> list[tuple[str, str]]:
    return [(found.name, found.reached_by) for found in find_unregistered(recipe)]


@pytest.mark.parametrize(
    "recipe",
    [
        toy, varied.varied_language, varied.averaged, varied.pythonic, varied.streamed, varied.normalised, varied.timed,
        *[lambda schedule=name: varied.averaged(schedule=schedule) for name in ("linear", "step", "plateau")],
    ],
)  # fmt: skip
def test_a_recipe_that_registers_all_state_has_no_finding(recipe: Any) -> None:
    assert names(recipe()) == []


def use(*values: object) -> Tensor:
    return torch.zeros(())


def _global(model: nn.Module, batch: Any) -> Tensor:
    return use(GLOBAL)


def _helper() -> Tensor:
    return use([use(GLOBAL) for _ in range(1)])


def _by_a_helper(model: nn.Module, batch: Any) -> Tensor:
    return _helper()


def _default(model: nn.Module, batch: Any, target: nn.Module = GLOBAL) -> Tensor:
    return use(target)


@dataclasses.dataclass
class Box:
    inside: object

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return use(self.inside)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return use(self.inside)


BOX = Box({"nets": (GLOBAL,)})


def _boxed(model: nn.Module, batch: Any) -> Tensor:
    return use(BOX)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (_global, "GLOBAL"),
        (_by_a_helper, "GLOBAL"),
        (_default, "target"),
        (functools.partial(_default, target=GLOBAL), "target"),
        (torch.no_grad()(_global), "GLOBAL"),
        (Box(GLOBAL).loss, "self.inside"),
        (Box(GLOBAL), "loss.inside"),
        (_boxed, "BOX.inside['nets'][0]"),
    ],
)
def test_state_is_found_wherever_a_function_can_reach_it(loss: Any, name: str) -> None:
    assert names(make(net(), loss)) == [(name, "loss")]


@pytest.mark.parametrize(
    "generator", [torch.Generator(), np.random.default_rng(3), np.random.RandomState(3), random.Random(3)]
)
def test_a_generator_of_the_recipes_own_is_found(generator: Any) -> None:
    (found,) = find_unregistered(make(net(), lambda model, batch: use(generator)))
    assert (found.name, found.is_generator, found.is_copy, len(found.sha256)) == ("generator", True, False, 64)
    globals_ = (random._inst, np.random.mtrand._rand, torch.default_generator, random.SystemRandom())  # type: ignore[attr-defined]
    assert names(make(net(), lambda model, batch: use(globals_))) == []


def test_the_digest_follows_the_state() -> None:
    recipe = careless.average()
    (before,) = find_unregistered(recipe)
    with torch.no_grad():
        recipe.model[0].weight += 1  # type: ignore[index,operator]
    assert find_unregistered(recipe) == [before]
    recipe.after_step()  # type: ignore[misc]
    (after,) = find_unregistered(recipe)
    assert (before.name, before.remedy) == ("average", 'extras={"average": average}')
    assert after == dataclasses.replace(before, sha256=after.sha256)
    assert after.sha256 != before.sha256


def find(model: nn.Module, value: object) -> Unregistered:
    (found,) = find_unregistered(make(model, lambda model, batch: use(value)))
    return found


def test_a_copy_of_the_model_or_a_part_differs_from_a_teacher() -> None:
    model = net()
    other = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    assert find(model, copy.deepcopy(model)).is_copy
    assert find(model, other).is_copy, "it has the model's shapes"
    assert find(model, AveragedModel(model)).is_copy
    assert find(model, Average(model)).is_copy
    assert find(model, copy.deepcopy(model[0])).is_copy
    assert not find(model, nn.Linear(8, 6)).is_copy
    assert not find(model, nn.Linear(3, 3)).is_copy
    normed = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6))
    assert not find(normed, nn.LayerNorm(6)).is_copy, "it is equal by its construction only"


def test_a_wrapper_of_registered_tensors_counts_as_registered() -> None:
    model = net()
    head = nn.Linear(1, 1)
    wrappers = [nn.DataParallel(model), model[:2], nn.CrossEntropyLoss(), nn.Sequential(model, head)]
    recipe = make(model, lambda model, batch: use(wrappers), extras={"head": head})
    assert names(recipe) == []
    assert names(dataclasses.replace(recipe, extras={})) == [("wrappers[3]", "loss")]


def test_a_module_in_a_plain_list_of_the_model_is_found() -> None:
    found = find_unregistered(careless.heads())
    assert [each.name for each in found] == ["model.heads[0]", "model.heads[1]"]
    assert "nn.ModuleList" in found[0].remedy


def test_state_inside_a_registered_extra_is_not_found() -> None:
    replay = varied.Replay()
    recipe = make(net(), lambda model, batch: fit(model, batch) * replay.random.random(), extras={"replay": replay})
    assert names(recipe) == []
    assert names(dataclasses.replace(recipe, extras={})) == [("replay", "loss")]
