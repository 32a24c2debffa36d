"""A checkpoint from which no run can continue is refused in one line, before anything is written."""

import argparse
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from holdfast.errors import ConfigError
from holdfast.extensions.importing.taking_over import move_in
from holdfast.provenance.model_files import hash_foreign
from tests.support import movers
from tests.support.movers import PER_EPOCH, TOTAL
from tests.support.trainings import make

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of a save in one process

ran: list[str] = []


class Harmful:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("ran",)


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    model, optimizer, scheduler = movers.make()
    for batch in zip(*(each.split(8) for each in movers.points().tensors), strict=True):
        movers.take_step(model, optimizer, scheduler, batch)
    return movers.states(model, optimizer, scheduler, PER_EPOCH)


@pytest.fixture(autouse=True)
def fresh(same_process: None) -> None:
    ran.clear()


def optimizer_of(states: dict[str, Any], kind: str, **options: Any) -> dict[str, Any]:
    sizes = [len(group["params"]) for group in states["optimizer_state_dict"]["param_groups"]]
    groups = [{"params": [nn.Parameter(torch.zeros(1)) for _ in range(size)]} for size in sizes]
    return {"optimizer_state_dict": getattr(torch.optim, kind)(groups, **options).state_dict()}


def change(kind: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that returns what a source of this kind has in place of the states."""

    def changed(states: dict[str, Any]) -> dict[str, Any]:
        weights, optimizer = states["model_state_dict"], states["optimizer_state_dict"]
        match kind:
            case "names":
                return {
                    "model_state_dict": {f"layers.{name}": each for name, each in weights.items() if name[0] != "4"}
                }
            case "more":
                return {"model_state_dict": weights | {"head.weight": torch.zeros(1)}}
            case "shape":
                return {"model_state_dict": weights | {"0.weight": torch.zeros(8, 2)}}
            case "sgd":
                return optimizer_of(states, "SGD", lr=0.1, momentum=0.9)
            case "adam":
                return optimizer_of(states, "Adam", lr=0.01)
            case "decay":
                optimizer["param_groups"][0]["weight_decay"] = 0.3
            case "groups":
                optimizer["param_groups"] = [{**optimizer["param_groups"][0], "params": [*range(6)]}]
            case "moments":
                optimizer["state"][0]["exp_avg"] = torch.zeros(3, 2)
            case "flat moments":
                optimizer["state"][0]["exp_avg"] = torch.zeros(32)
            case "small moments":
                optimizer["state"][0]["exp_avg"] = torch.zeros(16, 1)
            case "whole moments":
                optimizer["state"][0]["exp_avg"] = torch.zeros(16, 2, dtype=torch.int64)
            case "nan":
                optimizer["state"][0]["exp_avg_sq"][0, 0] = torch.nan
            case "scheduler":
                return {"lr_scheduler": {"last_epoch": 6, "step_size": 3, "gamma": 0.1, "base_lrs": [0.01, 0.01]}}
            case "two":
                return {"ema": weights, "other": weights, "model_state_dict": {"x": torch.zeros(1)}}
            case "far":
                return {"step": TOTAL * 3}
            case "unknown":
                return {"step": "six", "optimizer_state_dict": None}
            case "code":
                return {"args": argparse.Namespace(lr=1)}
            case "harmful":
                return {"args": Harmful()}
        return {}

    return changed


REFUSED = {
    "names": (
        "the names of the weights don't fit: the source (model) lacks 9 weights of the model: 0.bias (nearest: "
        "layers.0.bias)"
    ),
    "more": "the names of the weights don't fit: the model lacks 1 weight of the source: head.weight",
    "shape": "the weight 0.weight has the shape (8, 2) in the source, and (16, 2) in the model",
    "sgd": "the source's optimizer is the state of a different optimizer than the run's AdamW: it has dampening, "
    "momentum, nesterov, and lacks amsgrad, betas, eps",
    "adam": "the source's optimizer is the state of a different optimizer than the run's AdamW: it lacks "
    "decoupled_weight_decay = True",
    "decay": (
        "parameter group 0 of the optimizer has weight_decay = 0.3 in the source, and weight_decay = 0.1 in the run"
    ),
    "groups": ("the optimizer's groups have [2, 4] parameters, but the groups of the source's optimizer have [6]"),
    "moments": (
        "in the source, exp_avg of the parameter 0.weight has the shape (3, 2), but the parameter has the shape (16, 2)"
    ),
    "flat moments": (
        "in the source, exp_avg of the parameter 0.weight has the shape (32,), but the parameter has the shape (16, 2)"
    ),
    "small moments": (
        "in the source, exp_avg of the parameter 0.weight has the shape (16, 1), but the parameter has "
        "the shape (16, 2)"
    ),
    "whole moments": (
        "in the source, exp_avg of the parameter 0.weight has values of int64, but those of AdamW are floats"
    ),
    "nan": "in the source, exp_avg_sq of the parameter 0.weight has NaN values",
    "scheduler": "the source's lr_scheduler is the state of a different scheduler than the run's CosineAnnealingLR: it "
    "has gamma, step_size, and lacks T_max, eta_min",
    "two": "several objects of the source have weights with the names of the model: ema, other",
    "far": "the run can't continue from step 72: with this configuration it has 54 steps (9 epochs of 6 steps)",
    "unknown": "the imported checkpoint doesn't say how many steps it has trained, only epoch = 1",
    "code": "at.pt is a pickle that names argparse.Namespace: reading it could run code, so Holdfast doesn't read it",
    "harmful": "at.pt is a pickle that names getattr: reading it could run code",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_with_a_hint(tmp_path: Path, states: dict[str, Any], kind: str) -> None:
    source = copy.deepcopy(states)
    torch.save(source | change(kind)(source), tmp_path / "at.pt")
    training = make(tmp_path, "tests.support.movers:recipe")
    before = {name: each.clone() for name, each in training.recipe.model.state_dict().items()}
    with pytest.raises(ConfigError) as refused:
        move_in(training, str(tmp_path / "at.pt"), None, {})
    assert REFUSED[kind] in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == 1
    assert ran == []
    if kind in ("names", "more", "shape", "far", "unknown", "code"):
        assert all(torch.equal(each, before[name]) for name, each in training.recipe.model.state_dict().items())


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, states: dict[str, Any]) -> None:
    torch.save(states, tmp_path / "at.pt")
    whole = (tmp_path / "at.pt").read_bytes()
    training = make(tmp_path, "tests.support.movers:recipe")
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.pt can't be read: it is cut short"):
            move_in(training, str(tmp_path / "cut.pt"), None, {})


def test_a_source_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    training = make(tmp_path, "tests.support.movers:recipe")
    (tmp_path / "empty").mkdir()
    torch.save([1, 2], tmp_path / "list.pt")
    for name, message in (
        ("none", "there is no file or folder"),
        ("empty", "isn't a checkpoint that can be imported"), ("list.pt", "contains a list"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            move_in(training, str(tmp_path / name), None, {})


def test_a_dcp_folder_with_code_in_it_is_refused_and_none_runs(tmp_path: Path, states: dict[str, Any]) -> None:
    training = make(tmp_path, "tests.support.movers:recipe")
    dcp.save({"args": Harmful()}, checkpoint_id=tmp_path / "value", no_dist=True)
    dcp.save({"model": states["model_state_dict"]}, checkpoint_id=tmp_path / "metadata", no_dist=True)
    (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    for name in ("value", "metadata"):
        with pytest.raises(ConfigError, match="reading it could run code, so Holdfast doesn't read it"):
            move_in(training, str(tmp_path / name), None, {})
    assert ran == []
    dcp.save({"model": states["model_state_dict"]}, checkpoint_id=tmp_path / "cut", no_dist=True)
    data = tmp_path / "cut" / "__0_0.distcp"
    for size in (10, 0):
        data.write_bytes(data.read_bytes()[:size])
        with pytest.raises(ConfigError, match="one of its files is missing or cut short"):
            move_in(training, str(tmp_path / "cut"), None, {})


def test_a_folders_hash_covers_names_and_content(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_text("1")
    (tmp_path / "a" / "b" / "y").write_text("2")
    first = hash_foreign(tmp_path / "a")
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "z")
    renamed = hash_foreign(tmp_path / "a")
    (tmp_path / "a" / "z").write_text("3")
    assert len({first, renamed, hash_foreign(tmp_path / "a")}) == 3
