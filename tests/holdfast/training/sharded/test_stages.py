"""The union of the states of ranks that hold the stages of a pipeline, and each rank's part of it."""

from typing import Any

import pytest

from holdfast.errors import CheckpointDamaged, StateError
from holdfast.state.encoding import list_marked
from holdfast.training.sharded.stages import Wanted, unite_trees


def mark(name: str) -> dict[str, str]:
    return {"$tensor": name}


def make_tree(number: int, **changed: Any) -> dict[str, Any]:
    """Return the state's tree of a rank with one layer and two groups.

    Args:
        changed: changed values: of the first ``group``, or of a component.
    """
    name = f"layers.{number}.weight"
    group = {"lr": 0.1, "params": [name]} | changed.pop("group", {})
    optimizer = {"state": {name: {"step": mark(f"optimizer.state.{name}.step")}}}
    optimizer["param_groups"] = changed.pop("groups", [group, {"lr": 0.2, "params": []}])
    return {
        "model": {name: mark(f"model.{name}"), "scale": mark("model.scale")}, "optimizer": optimizer,
        "schedulers": [{"last_epoch": 3}], "scaler": None, "progress": {"rank": number},
    } | changed  # fmt: skip


def test_the_union_has_the_names_of_all_stages_and_the_rest_of_the_main_rank() -> None:
    found = unite_trees([make_tree(10), make_tree(2)])
    assert [*found["model"]] == ["layers.10.weight", "layers.2.weight", "scale"]
    assert {*found["optimizer"]["state"]} == {"layers.10.weight", "layers.2.weight"}
    assert found["optimizer"]["param_groups"] == [
        {"lr": 0.1, "params": ["layers.10.weight", "layers.2.weight"]},
        {"lr": 0.2, "params": []},
    ]
    assert found["progress"] == {"rank": 10}
    assert found == {**unite_trees([make_tree(2), make_tree(10)]), "progress": {"rank": 10}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group": {"lr": 0.3}}, "ranks 0 and 1 have different values of optimizer.param_groups.0.lr"),
        ({"groups": []}, "the optimizer has 2 parameter groups in rank 0 and 0 in rank 1"),
        ({"group": {"params": ["b", "a"]}}, "depends on the order of the parameters in optimizer.param_groups.0"),
        ({"model": {"scale": mark("model.other")}}, "ranks 0 and 1 have different values of model.scale"),
        ({"schedulers": [{"last_epoch": 4}]}, "ranks 0 and 1 have different values of schedulers"),
    ],
)
def test_stages_with_different_values_under_one_name_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        unite_trees([make_tree(0), make_tree(1, **changed)])


def test_a_rank_takes_its_own_names_from_the_union() -> None:
    union = unite_trees([make_tree(0), make_tree(1)])
    wanted = Wanted(frozenset({"layers.1.weight", "scale", "layers.9.weight"}), frozenset({"layers.1.weight"}))
    assert wanted.narrow(union) == {**make_tree(1), "progress": {"rank": 0}}
    assert {*list_marked(wanted.narrow(union))} == {
        "model.layers.1.weight", "model.scale", "optimizer.state.layers.1.weight.step",
    }  # fmt: skip


def test_a_tree_without_a_model_is_damage() -> None:
    with pytest.raises(CheckpointDamaged):
        Wanted(frozenset(), frozenset()).narrow({"modal": {}, "optimizer": {}})
