"""A recipe is found by name and built with checked settings, or refused with a message of one line."""

import dataclasses
import sys
from pathlib import Path

import pytest

from holdfast import recipe
from holdfast.errors import RecipeError
from tests.support.toy import toy


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "written.py").write_text(text)
        sys.modules.pop("written", None)
        return "written:build"

    return write


def test_settings_are_completed_from_the_signature() -> None:
    def build(lr: float = 0.1, *, layers: int = 2, name: str = "a") -> None: ...

    assert recipe.resolve_settings(build, {"layers": 3}) == {"lr": 0.1, "layers": 3, "name": "a"}


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"lrr": 1}, "unknown key settings.lrr", "did you mean lr?"),
        ({}, "settings.lr is missing", "add lr under"),
        ({"lr": "fast"}, "settings.lr = 'fast'", ""),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str, hint: str) -> None:
    def build(lr: float) -> None: ...

    with pytest.raises(RecipeError, match=message) as caught:
        recipe.resolve_settings(build, settings)
    assert hint in caught.value.hint


def test_a_recipe_may_take_any_setting() -> None:
    def build(lr: float = 1.0, **others: object) -> None: ...

    assert recipe.resolve_settings(build, {"depth": 3}) == {"lr": 1.0, "depth": 3}


def test_an_annotation_that_only_a_type_checker_resolves_allows_any_value(write_module) -> None:  # type: ignore[no-untyped-def]
    builder = recipe.find_program(write_module("def build(lr: 'Later' = 0.1) -> 'Recipe': ..."))
    assert recipe.resolve_settings(builder, {"lr": 2}) == {"lr": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere_to_be_found", "written.py:1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("1 / 0", "written.py:1: ZeroDivisionError: division by zero"),
        ("def build(: pass", "written.py:1: SyntaxError"),
        ("def biuld(): pass", "written has no build"),
        ("build = 3", "expected a function, found a int"),
        ("def build() -> 'Recipe': return 3", "expected a holdfast.Recipe, found a int"),
        ("def build() -> 'Recipe':\n    raise KeyError('x')", "written.py:2: KeyError: 'x'"),
        ("def build(x, /) -> 'Recipe': pass", "by position"),
    ],
)
def test_an_error_in_a_recipe_names_its_line(write_module, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match=message):
        recipe.build_recipe(write_module(text), {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0), ("batch_size", 2.5), ("grad_accum", 0), ("steps_per_epoch", -1), ("sample_size", 0),
        ("clip_norm", 0.0), ("clip_norm", -1.0), ("clip_norm", float("nan")),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(RecipeError, match=f"the recipe's {name} = {value!r}: expected"):
        dataclasses.replace(toy(), **{name: value})  # type: ignore[arg-type]


def test_a_file_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_path.py").write_text("def build(lr: 'Later' = 0.1) -> 'Recipe': ...")
    monkeypatch.setattr("sys.path", [*sys.path])
    assert recipe.find_program(f"{tmp_path}/by_path.py:build").__module__ == "by_path"
    with pytest.raises(RecipeError, match=r"there is no file .*/nowhere\.py"):
        recipe.find_program(f"{tmp_path}/nowhere.py:build")
    (tmp_path / "json.py").write_text("")
    with pytest.raises(RecipeError, match="another module json is loaded, from "):
        recipe.find_program(f"{tmp_path}/json.py:build")


def test_a_missing_module_differs_from_one_that_fails() -> None:
    with pytest.raises(RecipeError, match="there is no module nowhere_at_all") as caught:
        recipe.find_program("nowhere_at_all:f")
    assert "PYTHONPATH" in caught.value.hint
