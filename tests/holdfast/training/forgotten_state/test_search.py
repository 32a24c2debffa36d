"""The search finds state that a recipe's functions reach and that no checkpoint has, wherever it is."""

import argparse
import collections
import dataclasses
import enum
import functools
import itertools
import queue
import random
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import Recipe
from holdfast.checkpoint.found import Found, find_suspects, find_unkept, leave_out_repeated
from holdfast.training import examine_recipe
from holdfast.training.forgotten_state.remedies import At, Scope, find_remedy
from holdfast.training.kept import LOOP
from tests.support import careless, varied
from tests.support.careless import fit, make, net
from tests.support.toy import toy

GLOBAL = nn.Linear(3, 3)


def find(recipe: Recipe) -> list[Found]:
    """Return the objects with a state of their own that the search finds."""
    return [found for found in examine_recipe(recipe).found if not found.is_plain]


def names(recipe: Recipe) -> list[tuple[str, str]]:
    return [(found.name, found.reached_by) for found in find(recipe)]


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
    (found,) = find(make(net(), lambda model, batch: use(generator)))
    assert (found.name, len(found.sha256)) == ("generator", 64)
    globals_ = (random._inst, np.random.mtrand._rand, torch.default_generator, random.SystemRandom())  # type: ignore[attr-defined]
    assert names(make(net(), lambda model, batch: use(globals_))) == []


def test_the_digest_follows_the_state() -> None:
    recipe = careless.average()
    (before,) = find(recipe)
    with torch.no_grad():
        recipe.model[0].weight += 1  # type: ignore[index,operator]
    assert find(recipe) == [before]
    recipe.after_step()  # type: ignore[misc]
    (after,) = find(recipe)
    assert (before.name, before.remedy) == ("average", 'extras={"average": average}')
    assert after == before.model_copy(update={"sha256": after.sha256})
    assert after.sha256 != before.sha256


def test_a_wrapper_of_registered_tensors_counts_as_registered() -> None:
    model = net()
    head = nn.Linear(1, 1)
    wrappers = [nn.DataParallel(model), model[:2], nn.CrossEntropyLoss(), nn.Sequential(model, head)]
    recipe = make(model, lambda model, batch: use(wrappers), extras={"head": head})
    assert names(recipe) == []
    assert names(dataclasses.replace(recipe, extras={})) == [("wrappers[3]", "loss")]


def test_a_module_in_a_plain_list_of_the_model_is_found() -> None:
    found = find(careless.heads())
    assert [each.name for each in found] == ["model.heads[0]", "model.heads[1]"]
    assert "nn.ModuleList" in found[0].remedy


def test_state_inside_a_registered_extra_is_not_found() -> None:
    replay = varied.Replay()
    recipe = make(net(), lambda model, batch: fit(model, batch) * replay.random.random(), extras={"replay": replay})
    assert names(recipe) == []
    assert names(dataclasses.replace(recipe, extras={})) == [("replay", "loss")]


# ---- plain values, which two processes compare


class State:
    """Has a class attribute, and is given others."""

    shared = 0
    count: int


@dataclasses.dataclass
class Counted:
    ticks: int = 0


class Phase(enum.Enum):
    WARM_UP = 1
    MAIN = 2


@functools.lru_cache
def _table(size: int) -> list[int]:
    return [size]


def _numbers() -> Iterator[int]:
    yield from range(9)


class Slotted:
    __slots__ = ("value",)


def _set(name: str, value: Any) -> Callable[[Any], object]:
    return lambda thing: setattr(thing, name, value)


def _slotted() -> Slotted:
    thing = Slotted()
    thing.value = 1
    return thing


def _box(value: Any) -> Any:
    return lambda: {"thing": [value]}


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "a dataclass": (Counted, _set("ticks", 2), "thing.ticks"),
    "a bare class": (State, _set("count", 2), "thing"),
    "a class attribute": (State, lambda thing: setattr(type(thing), "shared", State.shared + 1), "thing.shared"),
    "a namespace": (lambda: types.SimpleNamespace(n=1), _set("n", 2), "thing.n"),
    "an argparse namespace": (lambda: argparse.Namespace(n=1), _set("n", 2), "thing.n"),
    "a slot": (_slotted, _set("value", 2), "thing.value"),
    "a list": (list, lambda thing: thing.append(1), "thing"),
    "a dict of lists": (lambda: {"a": [1]}, lambda thing: thing["a"].append(1), "thing"),
    "the end of a long list": (lambda: [0] * 9999, lambda thing: thing.append(1), "thing"),
    "an order": (lambda: {"a": 1, "b": 2}, lambda thing: thing.update(a=thing.pop("a")), "thing"),
    "a set": (set, lambda thing: thing.add("x"), "thing"),
    "a deque": (collections.deque, lambda thing: thing.append(1), "thing"),
    "a counter": (collections.Counter, lambda thing: thing.update("a"), "thing"),
    "a tensor": (lambda: torch.zeros(3), lambda thing: thing.add_(1), "thing"),
    "an array": (lambda: np.zeros(3), lambda thing: thing.__iadd__(1), "thing"),
    "a queue": (queue.Queue, lambda thing: thing.put(1), "thing.queue"),
    "a generator": (_numbers, next, "thing"),
    "a count": (itertools.count, next, "thing"),
    "an enumeration": (lambda: enumerate("abc"), next, "thing"),
    "a cache": (lambda: _table, lambda thing: thing(1000 + thing.cache_info().misses), "thing"),
    "an enum": (lambda: types.SimpleNamespace(phase=Phase.WARM_UP), _set("phase", Phase.MAIN), "thing.phase"),
    "an object in a list": (lambda: [Counted()], lambda thing: setattr(thing[0], "ticks", 2), "thing[0].ticks"),
    "a bound method": (lambda: Counted().__eq__, lambda thing: setattr(thing.__self__, "ticks", 2), "self.ticks"),
    "a function's attribute": (lambda: _numbers, lambda thing: vars(thing).update(n=len(vars(thing))), "_numbers.n"),
}


def _make_loss(thing: Any) -> Any:
    return lambda model, batch: use(thing)


@pytest.mark.parametrize("kind", CHANGES)
def test_every_kind_of_value_that_changes_is_a_suspect(kind: str) -> None:
    make_thing, change, name = CHANGES[kind]
    thing = make_thing()
    if kind == "a function's attribute":
        thing.n = -1
    recipe = make(net(), _make_loss(thing))
    before = examine_recipe(recipe).found
    assert find_suspects(examine_recipe(recipe).found, before) == []
    change(thing)
    assert name in [each.name for each in find_suspects(examine_recipe(recipe).found, before)]


class Counting(torch.optim.SGD):
    calls = 0


class Noting(nn.Linear):
    """Has a count, a buffer that is not saved, and an output that it looks at."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.calls, self.seen = 0, torch.zeros(())
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean += 1
        self.seen = x.detach().mean()
        return super().forward(x)


def _hook(counts: list[int]) -> Any:
    return lambda *_: counts.append(1)


@pytest.mark.parametrize("where", ["module", "tensor", "optimizer"])
def test_a_hook_that_counts_is_reached(where: str) -> None:
    counts: list[int] = []
    model = net()
    recipe = make(model, fit)
    if where == "module":
        model[0].register_forward_hook(_hook(counts))
    elif where == "tensor":
        model[0].weight.register_hook(_hook(counts))  # type: ignore[operator,union-attr]
    else:
        recipe.optimizer.register_step_pre_hook(_hook(counts))  # type: ignore[union-attr]
    before = examine_recipe(recipe).found
    counts.append(1)
    assert [each.name for each in find_suspects(examine_recipe(recipe).found, before)] == ["counts"]


def test_attributes_of_modules_and_optimizers_are_suspects_and_outputs_are_not() -> None:
    model = Noting()
    optimizer = Counting(model.parameters(), lr=0.1)
    recipe = make(model, fit, optimizer=optimizer)
    before = examine_recipe(recipe).found
    model(torch.ones(2, 8))
    optimizer.calls = 3
    suspects = find_suspects(examine_recipe(recipe).found, before)
    assert {each.name for each in suspects} == {"model.calls", "model.mean", "optimizer.calls"}
    assert all(each.place.startswith(f"{__file__}:") for each in suspects if each.name != "optimizer.calls")


def test_of_values_that_no_compared_step_has_read_only_the_users_attributes_are_unkept() -> None:
    model, losses = Noting(), list[float]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses.append(0.5)
        return fit(model, batch)

    recipe = make(model, loss)
    before = examine_recipe(recipe).found
    loss(model, [torch.ones(2, 8), torch.ones(2, 1)])
    after = examine_recipe(recipe).found
    assert {each.name for each in find_suspects(after, before)} == {"model.calls", "model.mean", "losses"}
    assert [each.name for each in find_unkept(after, before)] == ["model.calls", "model.mean"]


class Layered(Noting):
    """Inherits the count of another class of the user's, and has private attributes, one of them a library's."""

    def forward(self, x: Tensor) -> Tensor:
        self._own = getattr(self, "_own", 0) + 1
        return super().forward(x)


def test_a_private_attribute_is_a_suspect_if_the_users_code_names_it() -> None:
    model = Layered()
    model._own = model._cache = 0
    recipe = make(model, fit)
    before = examine_recipe(recipe).found
    model._own, model._cache, model.seen = 1, 1, torch.ones(())
    names = [each.name for each in find_suspects(examine_recipe(recipe).found, before)]
    assert names == ["model._own"]


def test_what_a_checkpoint_has_is_no_suspect() -> None:
    model, replay = net(), varied.Replay()
    parameters = [*model.parameters()]
    view = parameters[0].detach().view(-1)
    recipe = make(model, lambda model, batch: use(parameters, view, replay), extras={"replay": replay})
    before = examine_recipe(recipe).found
    with torch.no_grad():
        parameters[0].add_(1)
    replay.random.random()
    assert find_suspects(examine_recipe(recipe).found, before) == []


def time_it() -> types.SimpleNamespace:
    """Return a clock's readings, and what a program makes of them."""
    return types.SimpleNamespace(
        began=read(time.perf_counter), at=read(time.time), began_ns=time.monotonic_ns(),
        laps={"last": read(time.monotonic), "count": 0}, total=0.0, near=0.0,
    )  # fmt: skip


def read(clock: Callable[[], float]) -> float:
    """Return a reading that is no whole number of milliseconds, as all but one in a thousand are."""
    while round(found := clock(), 3) == found:
        pass
    return found


def test_a_reading_of_a_clock_is_no_suspect_and_what_is_computed_from_it_is() -> None:
    timed = time_it()
    recipe = make(net(), lambda model, batch: use(timed))
    before = examine_recipe(recipe).found
    vars(timed).update(vars(time_it()))
    assert find_suspects(examine_recipe(recipe).found, before) == []
    timed.laps["count"] = 1
    timed.total += time.perf_counter() - timed.began
    timed.near = torch.tensor(time.perf_counter() - 0.1).item()  # a float of 32 bits
    names = [each.name for each in find_suspects(examine_recipe(recipe).found, before)]
    assert names == ["timed.total", "timed.near", "timed.laps"]


def test_a_module_without_data_has_no_state() -> None:
    """Such a module calls `torch.func.functional_call` with the parameters of several models."""
    base, teacher = nn.Linear(3, 3).to("meta"), nn.Linear(3, 3)
    assert names(make(net(), lambda model, batch: use(base, teacher))) == [("teacher", "loss")]


@functools.lru_cache
def _square(number: int) -> int:
    return number**2


def test_no_advice_keeps_a_cache_of_results() -> None:
    scope = Scope({"square": _square})
    remedy = find_remedy(At(LOOP, "square", _square), scope, is_loop=True, is_kept=False, is_assigned=False)
    assert remedy.startswith("keep nothing if the results follow from the arguments")


def test_loggers_of_python_are_not_entered() -> None:
    import logging

    log = logging.getLogger("a.test")
    recipe = make(net(), lambda model, batch: use(log))
    before = examine_recipe(recipe).found
    logging.getLogger("a.test.another")
    log.setLevel("ERROR")
    assert find_suspects(examine_recipe(recipe).found, before) == []


def test_the_search_counts_what_it_has_looked_at() -> None:
    assert examine_recipe(make(net(), fit)).looked_at > 0
    assert examine_recipe(make(nn.Linear(1, 1), torch.nn.functional.mse_loss, data=[0])).looked_at == 0


class ReplayBuffer:
    def __init__(self) -> None:
        self.items = np.zeros(8)
        self.names: list[str] = []
        self.position = 0


class LapTimer:
    def __init__(self) -> None:
        self.total, self.laps = 0.0, 0


def test_suspects_are_ordered_by_how_likely_they_change_a_step_and_loggers_come_last() -> None:
    timer, history, rows = LapTimer(), [0.0], ["row"]
    buffer, noise, teacher = ReplayBuffer(), torch.Generator(), nn.Linear(1, 1)
    recipe = make(net(), lambda model, batch: use(timer, history, rows, buffer, noise, teacher))
    before = examine_recipe(recipe).found
    timer.total, timer.laps = 1.5, 3
    history.append(1.0)
    rows.append("another")
    buffer.items[0], buffer.position = 1.0, 1
    noise.manual_seed(3)
    with torch.no_grad():
        teacher.weight += 1
    found = [each.name for each in find_suspects(examine_recipe(recipe).found, before)]
    assert found[:2] == ["teacher", "noise"]
    assert {*found[2:4]} == {"buffer.items", "buffer.position"}
    assert found[4] == "rows"
    assert {*found[5:]} == {"history", "timer.total", "timer.laps"}


def test_one_line_that_keeps_an_object_is_told_once() -> None:
    told = {"kind": "int", "reached_by": "loop", "sha256": "1"}
    rows = [
        ("rb.items", "run.keep(items=rb.items)"), ("rb.position", "run.keep(rb=vars(rb))"),
        ("rb.full", "run.keep(rb=vars(rb))"), ("total", 'state = {"total": total}; run.keep(state=state)'),
        ("rb", 'state = {"rb": rb}; run.keep(state=state)'),  # it has new attributes
    ]  # fmt: skip
    suspects = [Found(name=name, remedy=remedy, **told) for name, remedy in rows]
    left = [(each.name, each.remedy) for each in leave_out_repeated(suspects)]
    assert left == [("rb.items", "run.keep(rb=vars(rb))"), rows[3]]
