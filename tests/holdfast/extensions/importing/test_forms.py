"""A run that goes on from another program's checkpoint trains what that program trains without a stop."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.state import AcceleratorState, GradientState

from holdfast.extensions.importing.taking_over import TakenOver, move_in
from holdfast.training import Training, run_program
from tests.support import movers
from tests.support.moved import go_on, make_config
from tests.support.movers import PER_EPOCH, TOTAL
from tests.support.trainings import make, save_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of a save in one process

STOP = 2 * PER_EPOCH


@pytest.fixture(autouse=True)
def fresh(same_process: None) -> Iterator[None]:
    torch.set_num_threads(1)  # as a rank has it: sums in several threads have different bits
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


@pytest.mark.parametrize(
    ("form", "keep"),
    [
        ("torch", lambda torchs, other: {"rng": {"torch": torchs}}),
        ("dcp", lambda torchs, other: {"rng": {"torch": torchs}}),
        ("torch", lambda torchs, other: {"rng": {"torch": torchs, "cuda": []}}),
        ("torch", lambda torchs, other: {"generators": {"cpu": torchs, "sampler": other, "seed": 7}}),
    ],
)
def test_generators_in_a_dictionary_of_tensors_are_no_model(tmp_path: Path, form: str, keep: Any) -> None:
    """The model drops values by torch's generator, so a run without its state trains different losses."""
    path = tmp_path / "at.pt"
    alone = movers.with_torch(path, STOP)
    saved = torch.load(path, weights_only=False)
    rng = saved.pop("rng")
    saved |= keep(rng.pop("torch"), torch.Generator().manual_seed(9).get_state()) | {"others": rng}
    torch.save(saved, path)
    if form == "dcp":
        path = tmp_path / "folder"
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    taken, losses = go_on(make_config(tmp_path, "loop"), path)
    assert losses == alone[STOP:]
    assert taken.origin.lacks == []
    assert not [note for note in taken.notes if "rng" in note]


def test_inside_a_pass_its_order_is_lost_and_named(tmp_path: Path) -> None:
    alone = movers.with_torch(tmp_path / "at.pt", STOP + 2)
    taken, losses = go_on(make_config(tmp_path, "loop"), tmp_path / "at.pt")
    assert taken.origin.lacks == ["the order of the samples in pass 3, which step 14 belongs to, is drawn again"]
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
    assert taken.notes[:2] == [
        f"the source's record of its step says {STOP}",
        f"the optimizer has counted {STOP} steps itself",
    ]
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
        "the source has no state of 1 parameter: 0.weight", "not imported: best, epoch, lr_scheduler, old"
    ]  # fmt: skip
    taken, _ = go_on(make_config(tmp_path, "loop"), path, names={"old": ""})
    assert "not imported: epoch, scaler" in taken.notes


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
    assert "not imported: best, epoch" in taken.notes


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
    assert "the step is the optimizer's own count, because the source has no other count" in taken.notes


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_loop_goes_on_from_other_forms_bit_for_bit(tmp_path: Path, form: str) -> None:
    alone = {"safetensors": movers.with_safetensors, "dcp": movers.with_dcp}[form](tmp_path / "at", STOP)
    taken, losses = go_on(make_config(tmp_path, "loop"), tmp_path / "at")
    assert losses == alone[STOP:]
    assert (taken.origin.form, taken.origin.step, taken.origin.lacks) == (form, STOP, [])


@pytest.mark.slow
def test_a_dcp_folder_of_several_ranks_gives_the_bytes_of_a_whole_file(tmp_path: Path) -> None:
    movers.with_two_ranks(tmp_path)
    assert len([*(tmp_path / "dcp").glob("*.distcp")]) == 2
    found = [take(tmp_path / name, tmp_path / f"from {name}") for name in ("dcp", "whole.pt")]
    assert [taken.origin.form for taken, _ in found] == ["dcp", "torch"]
    assert found[0][0].taken == found[1][0].taken
    assert found[0][1] == found[1][1]


def take(source: Path, folder: Path) -> tuple[TakenOver, str]:
    """Import a checkpoint; return what was taken over, and the content id of the run's first checkpoint."""
    found = []

    def moves_in(training: Training) -> Iterator[None]:
        taken = move_in(training, str(source), None, {})
        found.append((taken, save_state(training, folder)[1].checkpoint_sha256))
        yield from ()

    run_program(make_config(folder, "one_group"), moves_in)
    return found[0]


def fresh_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
