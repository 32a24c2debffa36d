"""Each value of a generated grid comes back in a process that resumes, or is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Run, RunConfig
from holdfast.config import Determinism
from holdfast.errors import HoldfastError, RecipeError, StateError
from holdfast.state import Ties, as_stateful, from_payload, to_payload
from holdfast.training.forgotten_state.digests import digest
from tests.conftest import IS_SOAK
from tests.support import grid
from tests.support.trainings import live

Cells = dict[str, Callable[[], Any]]


def refuses(owner: str, name: str, value: Any) -> bool:
    """Return whether a value is refused, by its name."""
    if owner == grid.LATER and name.startswith("dataclass"):
        return True  # a step has added an object
    message = ""
    try:
        if owner in (grid.KEPT, grid.LATER):
            to_payload({"extras": {"own": as_stateful("own", {"it": value}, Ties({})).state_dict()}})
        elif owner in (grid.OPTIMIZER, grid.GLOBAL):
            members = ["own"] if owner == grid.OPTIMIZER else []
            to_payload({"optimizer": {"state": {"own": {"it": value}}, "param_groups": [{"params": members}]}})
        else:
            to_payload({"extras": {"own": {"it": value}}})
    except HoldfastError as error:
        message = error.message
    assert not message or any(each in message for each in ("own['it']", "own.it", "own.value.it")), message
    return bool(message)


def choose(owner: str) -> Cells:
    """Return the cells that an owner can have; in the suite, a part of them."""
    cells = list(grid.list_cells())
    cells = cells if IS_SOAK else cells[grid.OWNERS.index(owner) :: 17]
    if owner in (grid.BUFFER, grid.ATTRIBUTE):
        kinds = torch.Tensor if owner == grid.BUFFER else (torch.Tensor, np.ndarray, bool, int, str, np.float32)
        cells = [(name, make) for name, make in cells if isinstance(make(), kinds)]
    return {name: make for name, make in cells if not refuses(owner, name, make())}


class Careless:
    """An object that restores a tuple as a list."""

    def __init__(self) -> None:
        self.range: Any = (0.0, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"range": self.range}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.range = list(state["range"])


class Rounding(grid.Holder):
    """An optimizer whose own code rounds its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for own in self.state.values():
            own["it"] = own["it"].half().float()


def configure(folder: Path, recipe: str) -> RunConfig:
    return RunConfig(
        recipe=recipe, run="grid", store=str(folder), epochs=2, seed=1, determinism=Determinism(mode="fast")
    )  # fmt: skip


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("owner", grid.OWNERS)
def test_each_value_of_the_grid_comes_back_or_is_refused_by_name(tmp_path: Path, owner: str) -> None:
    program = grid.Program(owner, choose(owner))
    grid.PROGRAMS.append(program)
    config = configure(tmp_path, "tests.support.grid:train")
    saved, _ = live(config, 2)
    live(config, 3, saved)
    assert program.seen.keys() == program.cells.keys()
    assert len(program.seen) > 10
    for name, make in program.cells.items():
        assert grid.describe(program.seen[name]) == grid.describe(make()), name


def keep_careless(run: Run) -> None:
    """Keep an object that restores a different value than it has saved."""
    model = nn.Linear(1, 1)
    run.keep(model=model, optimizer=torch.optim.SGD(model.parameters()), scale=Careless())
    for _ in run.steps(per_epoch=4):
        raise AssertionError("a step was trained")


def keep_rounding(run: Run) -> None:
    """Keep an optimizer that restores different numbers than it has saved."""
    model = nn.Linear(1, 1)
    optimizer = Rounding(model.parameters())
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=4):
        assert step.number == 0, "a second step was trained"
        optimizer.state[model.weight]["it"] = torch.tensor(0.1)
        step.log(loss=0.0)


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("loop", "message", "hint"),
    [
        ("keep_careless", r"before the first step: .*extras\.scale\.range .*a different kind of value", "of Careless"),
        ("keep_rounding", r"after the first step: .*optimizer\.state\..*\.it .*different elements", "of Rounding"),
    ],
)
def test_a_value_that_does_not_come_back_is_refused_at_the_first_step(
    tmp_path: Path, loop: str, message: str, hint: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        live(configure(tmp_path, f"{__name__}:{loop}"), 3)
    assert hint in str(caught.value.hint)


def look_for_same_objects(run: Run) -> None:
    """Keep values under second names, and check that they are the same objects after the first two steps."""
    model = nn.Linear(1, 1)
    optimizer, scale = grid.Holder(model.parameters()), grid.Keeper()
    new, moment, scale.values["x"] = torch.zeros(3), torch.zeros(3), [torch.zeros(2)]
    kept: dict[str, Any] = {"x": None, "inner": [new]}
    inner, own, values = kept["inner"], optimizer.state, scale.values
    run.keep(model=model, optimizer=optimizer, kept=kept, scale=scale)
    for step in run.steps(per_epoch=4):
        if step.number == 0:
            kept["x"], optimizer.state[model.weight]["it"] = new, moment
        assert kept["x"] is new
        assert kept["inner"] is inner
        assert inner[0] is new
        assert optimizer.state is own
        assert own[model.weight]["it"] is moment
        assert scale.values is values
        step.log(loss=0.0)


@pytest.mark.usefixtures("same_process")
def test_objects_have_their_own_attributes_and_items_after_the_round_trip(tmp_path: Path) -> None:
    live(configure(tmp_path, f"{__name__}:look_for_same_objects"), 3)


def test_an_item_that_a_step_resizes_in_place_is_restored_in_place() -> None:
    def build() -> tuple[Any, torch.Tensor]:
        queue = torch.empty(0, 2)
        return as_stateful("own", {"queue": queue}, Ties({})), queue

    lived, queue = build()
    queue.data = torch.ones(3, 2, dtype=torch.bfloat16).T
    state = from_payload(to_payload({"extras": lived.state_dict()}))["extras"]
    resumed, queue = build()
    resumed.load_state_dict(state)
    assert resumed.value["queue"] is queue
    assert (queue.dtype, queue.shape, queue.stride()) == (torch.bfloat16, (2, 3), (1, 2))
    assert to_payload(resumed.state_dict()).tree == to_payload(lived.state_dict()).tree


def test_a_tensor_whose_memory_was_freed_is_refused_and_not_read() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    assert digest(tensor)
    with pytest.raises(StateError, match=r"the memory of extras\.own was freed"):
        to_payload({"extras": {"own": tensor}})
