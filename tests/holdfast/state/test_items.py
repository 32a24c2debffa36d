"""The items of a kept container are restored in place where they are the same objects, and nowhere else."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import RecipeError
from holdfast.state import Ties, as_stateful
from tests.holdfast.state.test_round_trips import there_and_back

Made = tuple[dict[str, Any], dict[str, Any]]


def cut(make: Callable[[], Made], step: Callable[[dict[str, Any], dict[str, Any]], None]) -> tuple[Made, Made]:
    """Return a program's kept container and other variables after a step: as they are, and as a resume gives them.

    Args:
        make: builds both, as each process does.
    """
    (kept, others), (built, its) = make(), make()
    modules = {"model": (others, its)} if "model" in others else {}
    one, other = (
        as_stateful("state", each, Ties({name: pair[place]["model"] for name, pair in modules.items()}))
        for place, each in enumerate((kept, built))
    )
    step(kept, others)
    other.load_state_dict(there_and_back(one.state_dict()))
    assert list(map(str, other.state_dict().items())) == list(map(str, one.state_dict().items()))
    return (kept, others), (built, its)


def test_a_view_of_the_data_is_not_written_through() -> None:
    def make() -> Made:
        data = torch.arange(20.0)
        return {"x": data[:4]}, {"data": data}

    def step(kept: dict[str, Any], others: dict[str, Any]) -> None:
        kept["x"] = others["data"][8:12]

    _, (built, its) = cut(make, step)
    assert its["data"].tolist() == [*range(20)]
    assert built["x"].tolist() == [8, 9, 10, 11]


def test_a_constant_that_the_loop_uses_again_stays_as_it_is() -> None:
    def make() -> Made:
        zeros, start = torch.zeros(3), {"a": [0]}
        return {"hidden": zeros, "counts": start}, {"zeros": zeros, "start": start}

    def step(kept: dict[str, Any], others: dict[str, Any]) -> None:
        kept["hidden"], kept["counts"] = kept["hidden"] + 1, {"a": [7]}

    _, (built, its) = cut(make, step)
    assert its["zeros"].tolist() == [0, 0, 0]
    assert its["start"] == {"a": [0]}
    assert built["hidden"].tolist() == [1, 1, 1]
    assert built["counts"] == {"a": [7]}


def test_other_names_for_items_that_a_step_changes_in_place_are_right() -> None:
    def make() -> Made:
        seen, logs, data = torch.zeros(4), [0], np.zeros(6)
        return {"seen": seen, "logs": logs, "window": data[2:4]}, {"seen": seen, "logs": logs, "data": data}

    def step(kept: dict[str, Any], others: dict[str, Any]) -> None:
        others["seen"][1] = 5
        others["logs"].append(1)
        kept["window"][:] = 3

    _, (built, its) = cut(make, step)
    assert built["seen"] is its["seen"]
    assert built["logs"] is its["logs"]
    assert its["seen"].tolist() == [0, 5, 0, 0]
    assert its["data"].tolist() == [0, 0, 3, 3, 0, 0]


def test_items_that_are_one_stay_one() -> None:
    def make() -> Made:
        model = nn.Linear(2, 3)
        return {"a": torch.zeros(4), "b": torch.ones(4), "list": [1], "buffer": torch.zeros(6)}, {"model": model}

    def step(kept: dict[str, Any], others: dict[str, Any]) -> None:
        kept["a"], kept["b"] = kept["b"], kept["a"]
        kept["again"] = kept["list"]
        kept["recent"] = kept["buffer"][2:4]
        kept["row"] = others["model"].weight.data[1]
        kept["new"] = torch.arange(5.0)
        kept["tail"] = kept["new"][3:]

    for kept, others in cut(make, step):
        assert kept["a"].tolist() == [1, 1, 1, 1]
        assert kept["again"] is kept["list"]
        kept["buffer"][3] = 9
        assert kept["recent"].tolist() == [0, 9]
        with torch.no_grad():
            others["model"].weight[1] = 4
        assert kept["row"].tolist() == [4, 4]
        kept["new"][4] = -1
        assert kept["tail"].tolist() == [3, -1]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_resume_never_changes_a_file(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "data.npy"
    np.arange(20, dtype=np.float32).tofile(path)

    def make() -> Made:
        data = torch.from_numpy(np.memmap(path, np.float32, mode=mode))
        return {"x": data[:4], "array": np.memmap(path, np.float32, mode=mode)[:4]}, {"data": data}

    def step(kept: dict[str, Any], others: dict[str, Any]) -> None:
        kept["x"], kept["array"] = others["data"][8:12], others["data"].numpy()[4:6]

    _, (built, _) = cut(make, step)
    assert built["x"].tolist() == [8, 9, 10, 11]
    assert built["array"].tolist() == [4, 5]
    assert np.fromfile(path, np.float32).tolist() == [*range(20)]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_cannot_be_kept_itself(mode: Any) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:  # tmp_path may be in memory that processes share
        np.zeros(4096).tofile(file.name)
        data = np.memmap(file.name, mode=mode)
    for each in (data, np.asarray(data), torch.from_numpy(data), torch.from_numpy(data)[10:20]):
        with pytest.raises(RecipeError, match=r"run\.keep\(data=\.\.\.\)"):
            as_stateful("data", each)


@pytest.mark.parametrize(
    "value",
    [torch.ones(1).expand(3), np.broadcast_to(np.ones(1), 3), np.ma.masked_array([1]), np.eye(2).view(np.matrix)],
)
def test_what_cannot_be_restored_in_place_cannot_be_kept_itself(value: Any) -> None:
    with pytest.raises(RecipeError, match=r"run\.keep\(x=\.\.\.\)"):
        as_stateful("x", value)


def test_a_container_that_contains_itself_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["own"] = [circle]
    with pytest.raises(RecipeError, match=r"circle\['own'\]\[0\] contains itself"):
        as_stateful("circle", circle)


def test_what_one_container_has_lost_to_another_is_still_the_same() -> None:
    """As a replay buffer has the array that an environment had at first, and has replaced since."""
    processes = []
    for _ in range(2):
        ties, values = Ties({}), {"env": {"place": np.zeros(4)}, "memory": [0]}
        kept = {name: as_stateful(name, each, ties) for name, each in values.items()}
        processes.append((values, kept))
        del values
    (values, kept), (others, built) = processes
    values["memory"].append(values["env"]["place"])  # type: ignore[attr-defined]
    values["env"]["place"] = np.ones(4)  # type: ignore[call-overload]
    states = there_and_back({name: each.state_dict() for name, each in kept.items()})
    for name, each in built.items():
        each.load_state_dict(states[name])
    for name, each in built.items():
        assert str(each.state_dict()) == str(kept[name].state_dict())
    assert others["env"]["place"].tolist() == [1] * 4  # type: ignore[call-overload]
    assert others["memory"][1].tolist() == [0] * 4  # type: ignore[index]
