"""Steps that change groups, caches and layers: each is resumed to the same bytes, or refused before a commit."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Determinism, RunConfig
from holdfast.errors import RecipeError, StateError
from tests.support.regrouped import PER_EPOCH, RESUMED
from tests.support.trainings import content_id, live

TOTAL = 3 * PER_EPOCH


def make_config(folder: Path, name: str, **settings: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.regrouped:{name}", run="r", store=str(folder), epochs=3, settings=settings,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


def assert_same_wherever_it_is_cut(config: RunConfig) -> None:
    straight, saved = content_id(live(config, TOTAL)[0]), None
    for stop in range(1, TOTAL + 1):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == straight
    for cut in (2, 5, 9, 13):
        assert content_id(live(config, TOTAL, live(config, cut)[0])[0]) == straight, cut


@pytest.mark.parametrize("loop", RESUMED)
def test_a_loop_that_changes_its_groups_or_caches_ends_on_the_same_bytes(tmp_path: Path, loop: str) -> None:
    assert_same_wherever_it_is_cut(make_config(tmp_path, loop))


@pytest.mark.parametrize("how", ["group", "frozen", "buffer"])
def test_a_recipe_that_unfreezes_ends_on_the_same_bytes(tmp_path: Path, how: str) -> None:
    assert_same_wherever_it_is_cut(make_config(tmp_path, "unfreezing", how=how))


def test_a_program_that_builds_other_groups_is_refused_after_its_steps_have_changed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import regrouped

    saved, _ = live(make_config(tmp_path, "adds_a_group"), 6)
    monkeypatch.setattr(regrouped, "adds_a_group", regrouped.appends_a_parameter)
    with pytest.raises(StateError, match="now builds different groups"):
        live(make_config(tmp_path, "moves_and_removes"), 8, saved)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("adapter", r"after step 3 the model has different tensors than when the loop began: 0\.bias, 0\.down\.bias"),
        ("layer", r"after step 3 the model has different tensors .*: 6\.bias, 6\.weight;"),
        ("buffer", r"after step 3 the model has different tensors .*: more;"),
        ("tied", r"after step 3 the model has different layers, or different ties .*: 5\.weight;"),
        (
            "parametrized",
            r"after step 3 the model has different tensors .*: 0\.parametrizations\.weight\.original,",
        ),
        ("kind", r"after step 3 the model has different layers, or different ties .*: 0;"),
        ("left state", r"after step 3 an optimizer has a state of 0\.bias, which it doesn't step any more"),
        ("stale", r"after step 3 an optimizer has a parameter of shape \(2, 2\)"),
    ],
)
def test_a_change_that_no_resume_could_build_is_refused_in_an_early_step(
    tmp_path: Path, how: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        live(make_config(tmp_path, "changes_its_structure", how=how), TOTAL)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("removed", r"the model has different tensors .*: 5\.bias, 5\.weight;"),
        ("loose", r"an optimizer has a parameter of shape \(2,\)"),
    ],
)
def test_such_a_change_in_a_later_step_is_refused_before_the_save(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"after step {TOTAL} {message}"):
        live(make_config(tmp_path, "changes_its_structure", how=how, at=6), TOTAL)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sparse", r"model\.graph is a torch\.sparse_coo tensor"),
        ("quantised", r"model\.small is a torch\.strided tensor of torch\.quint8"),
        ("complex128", r"model\.wave is a torch\.strided tensor of torch\.complex128"),
        ("set", r"extras\.values\.value\.a is a builtins\.set"),
        ("keys", r"the saved dict extras\.values\.value\.a\.value has a key of type tuple"),
        ("text", r"extras\.values\.value\.a is an array of <U1"),
        ("dropping", r"the model's load_state_dict doesn't accept the model's own state_dict: .*3\.bias"),
        ("load hook", r"the model's load_state_dict doesn't accept the model's own state_dict: .*3\.bias"),
        ("extra state", r"the model's load_state_dict doesn't accept the model's own state_dict: .*extra_state"),
        ("forgiving", r"the model's load_state_dict doesn't restore 0\.bias"),
        ("save hook", r"an optimizer steps 3\.bias, of shape \(2,\), and no saved object has"),
        ("no model", r"an optimizer steps 0\.0, of shape \(8, 4\), and no saved object has"),
    ],
)
def test_what_cannot_be_saved_or_restored_is_refused_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=rf"before the first step: {message}") as refused:
        live(make_config(tmp_path, "cannot_be_saved", how=how), TOTAL)
    assert refused.value.hint
    assert "step" not in capfd.readouterr().out


def test_a_sparse_buffer_that_is_built_anew_ends_on_the_same_bytes(tmp_path: Path) -> None:
    """The hint for one that can't be saved advises it."""
    assert_same_wherever_it_is_cut(make_config(tmp_path, "cannot_be_saved", how="sparse, built anew"))


def test_what_appears_in_the_first_step_is_refused_after_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match=r"after the first step: optimizer\.state\.0\.weight\.seen is a "):
        live(make_config(tmp_path, "cannot_be_saved", how="late"), TOTAL)
    assert capfd.readouterr().out.split() == ["step", "0"]


def test_an_ordinary_model_passes_the_checks(tmp_path: Path) -> None:
    live(make_config(tmp_path, "cannot_be_saved", how=""), 2)
