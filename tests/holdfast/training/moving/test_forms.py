"""A run that goes on from another program's checkpoint trains what that program trains without a stop."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from holdfast.training import move_in
from tests.support import movers
from tests.support.moved import go_on, make_config
from tests.support.movers import PER_EPOCH, TOTAL
from tests.support.trainings import make

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of a save in one process

STOP = 2 * PER_EPOCH


@pytest.fixture(autouse=True)
def fresh(same_process: None) -> Iterator[None]:
    torch.set_num_threads(1)  # as a rank has it: sums in several threads have other bits
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "RMSprop", "Adagrad", "Adafactor"])
def test_a_loop_goes_on_from_a_dictionary_bit_for_bit(tmp_path: Path, kind: str) -> None:
    alone = movers.with_torch(tmp_path / "at.pt", STOP, kind)
    taken, losses = go_on(make_config(tmp_path, "loop", kind=kind), tmp_path / "at.pt")
    assert losses == alone[STOP:]
    assert taken.origin.step == STOP
    assert taken.origin.lacks == []
    assert taken.origin.form == "torch"


def test_inside_a_pass_its_order_is_lost_and_named(tmp_path: Path) -> None:
    alone = movers.with_torch(tmp_path / "at.pt", STOP + 2)
    taken, losses = go_on(make_config(tmp_path, "loop"), tmp_path / "at.pt")
    assert taken.origin.lacks == ["order of pass 3, in which step 14 lies: another one is drawn"]
    assert len(losses) == TOTAL - STOP - 2
    assert losses != alone[STOP + 2 :]


def test_other_names_are_stripped_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "at.pt"
    alone = movers.with_torch(path, STOP)
    saved = torch.load(path, weights_only=False)
    weights = saved.pop("model_state_dict")
    for prefix in ("module._orig_mod.", "net.", "module."):
        torch.save(saved | {"net": {f"{prefix}{name}": each for name, each in weights.items()}}, path)
        taken, losses = go_on(make_config(tmp_path, "loop"), path)
        assert losses == alone[STOP:], prefix
        assert f"the prefix {prefix} was left out of the source's names" in taken.notes
    torch.save(saved | {"net": weights}, path)
    names = {name: f"body.{name}" for name in ("0", "1", "4")}
    assert go_on(make_config(tmp_path, "compiled"), path, names=names)[1] == alone[STOP:]


def test_a_step_that_the_source_contradicts_is_said(tmp_path: Path) -> None:
    movers.with_torch(tmp_path / "at.pt", STOP)
    taken, losses = go_on(make_config(tmp_path, "loop"), tmp_path / "at.pt", step=STOP + PER_EPOCH)
    assert taken.origin.step == STOP + PER_EPOCH
    assert taken.notes[:2] == [f"the source says step {STOP}", f"the optimizer has counted {STOP} steps itself"]
    assert len(losses) == TOTAL - STOP - PER_EPOCH


def test_a_scaler_that_the_loop_keeps_is_taken_over_and_what_is_left_is_said(tmp_path: Path) -> None:
    path = tmp_path / "at.pt"
    movers.with_torch(path, STOP)
    saved = torch.load(path, weights_only=False)
    saved["optimizer_state_dict"]["state"].pop(0)
    torch.save(
        saved | {"scaler": torch.amp.GradScaler("cpu", init_scale=4.0).state_dict(), "old": {"last_epoch": 3}}, path
    )
    taken, _ = go_on(make_config(tmp_path, "scaled"), path)
    assert "scaler" in taken.taken
    assert taken.notes[2:] == [
        "the source has no state of 1 parameter: 0.weight", "not taken over: best, epoch, lr_scheduler, old"
    ]  # fmt: skip
    taken, _ = go_on(make_config(tmp_path, "loop"), path, names={"old": ""})
    assert "not taken over: epoch, scaler" in taken.notes


def test_a_recipe_has_its_own_order_and_all_else_of_the_source(tmp_path: Path) -> None:
    movers.with_torch(tmp_path / "at.pt", STOP)
    saved = torch.load(tmp_path / "at.pt", weights_only=False)
    training = make(tmp_path, "tests.support.movers:recipe")
    taken = move_in(training, str(tmp_path / "at.pt"), None, {})
    assert training.progress.step == STOP
    for name, each in training.recipe.model.state_dict().items():
        assert torch.equal(each, saved["model_state_dict"][name]), name
    assert training.lrs == saved["lr_scheduler"]["_last_lr"]
    moments = training.recipe.optimizer.state_dict()["state"]  # type: ignore[union-attr]
    for number, state in saved["optimizer_state_dict"]["state"].items():
        assert all(torch.equal(each, moments[number][name]) for name, each in state.items())
    assert "not taken over: best, epoch" in taken.notes


def test_without_a_schedulers_state_a_recipes_is_stepped(tmp_path: Path) -> None:
    movers.with_torch(tmp_path / "at.pt", STOP)
    training = make(tmp_path, "tests.support.movers:recipe")
    taken = move_in(training, str(tmp_path / "at.pt"), None, {"lr_scheduler": "", "optimizer": ""})
    saved = torch.load(tmp_path / "at.pt", weights_only=False)
    assert training.lrs == saved["lr_scheduler"]["_last_lr"]
    assert taken.origin.lacks == ["optimizer"]


def test_a_loop_goes_on_from_accelerates_state_bit_for_bit(tmp_path: Path) -> None:
    alone = movers.with_accelerate(tmp_path / "state", STOP)
    fresh_accelerate()
    taken, losses = go_on(make_config(tmp_path, "accelerated"), tmp_path / "state")
    assert losses == alone[STOP:]
    assert taken.origin.lacks == []
    assert (taken.origin.form, taken.origin.step) == ("accelerate", STOP)
    assert "the step is the optimizer's own count: the source has no other" in taken.notes


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_loop_goes_on_from_other_forms_bit_for_bit(tmp_path: Path, form: str) -> None:
    alone = {"safetensors": movers.with_safetensors, "dcp": movers.with_dcp}[form](tmp_path / "at", STOP)
    taken, losses = go_on(make_config(tmp_path, "loop"), tmp_path / "at")
    assert losses == alone[STOP:]
    assert (taken.origin.form, taken.origin.step, taken.origin.lacks) == (form, STOP, [])


def fresh_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
