"""A function is found by name and called with checked settings, or refused with a message of one line."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from pydantic import BaseModel, Field, model_validator

from holdfast import Recipe, Run
from holdfast.errors import RecipeError
from holdfast.recipe import annotations, function
from holdfast.recipe.settings import make_arguments, resolve_settings
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

    assert resolve_settings(build, {"layers": 3}) == {"lr": 0.1, "layers": 3, "name": "a"}


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"lrr": 1}, "unknown key settings.lrr", "did you mean lr?"),
        ({}, "the recipe needs the setting settings.lr, and the configuration doesn't have it", "add lr under"),
        ({"lr": "fast"}, "settings.lr = 'fast'", ""),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str, hint: str) -> None:
    def build(lr: float) -> None: ...

    with pytest.raises(RecipeError, match=message) as caught:
        resolve_settings(build, settings)
    assert hint in caught.value.hint


def test_a_recipe_may_take_any_setting() -> None:
    def build(lr: float = 1.0, **others: object) -> None: ...

    assert resolve_settings(build, {"depth": 3}) == {"lr": 1.0, "depth": 3}


def test_an_annotation_that_only_a_type_checker_resolves_allows_any_value(write_module) -> None:  # type: ignore[no-untyped-def]
    builder = function.find_program(write_module("def build(lr: 'Later' = 0.1) -> 'Recipe': ..."))
    assert resolve_settings(builder, {"lr": 2}) == {"lr": 2}


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
        (
            "import ast\ndef build(lr: float, tree: ast.AST) -> 'Recipe': pass",
            "the parameter tree of the recipe's function has the type AST",
        ),
    ],
)
def test_an_error_in_a_recipe_names_its_line(write_module, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match=message):
        function.build_recipe(write_module(text), {})


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
    assert function.find_program(f"{tmp_path}/by_path.py:build").__module__ == "by_path"
    with pytest.raises(RecipeError, match=r"there is no file .*/nowhere\.py"):
        function.find_program(f"{tmp_path}/nowhere.py:build")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        function.find_program("mine.py:build")
    assert caught.value.hint.endswith('such a file is there as models/mine.py: recipe = "models/mine.py:build"')
    (tmp_path / "json.py").write_text("")
    with pytest.raises(RecipeError, match="Python has already loaded a different module json, from "):
        function.find_program(f"{tmp_path}/json.py:build")


def test_a_missing_module_differs_from_one_that_fails() -> None:
    with pytest.raises(RecipeError, match="there is no module nowhere_at_all") as caught:
        function.find_program("nowhere_at_all:f")
    assert "PYTHONPATH" in caught.value.hint


@pytest.mark.parametrize("name", ["cards", "chat"])
def test_a_recipe_that_left_the_wheel_is_named_with_its_place(name: str) -> None:
    with pytest.raises(RecipeError, match=f"there is no module holdfast.recipes.{name}") as caught:
        function.find_program(f"holdfast.recipes.{name}:{name}")
    assert caught.value.hint.startswith(f"it is now examples.{name}:{name}, in Holdfast's repository")


# ---- settings as a pydantic model, and the device


class Optimizer(BaseModel):
    lr: float = Field(0.1, gt=0, description="the learning rate")


class Settings(BaseModel):
    depth: int = Field(description="the number of layers")
    optimizer: Optimizer = Optimizer()
    sizes: list[int] = Field(default_factory=lambda: [1, 2])

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.depth > 9:
            raise ValueError("too deep")
        return self


def build(settings: Settings, device: torch.device) -> Recipe:
    raise AssertionError((settings, device))


def test_a_pydantic_model_has_all_settings() -> None:
    given = {"depth": 3, "optimizer": {"lr": 1}}
    assert resolve_settings(build, given) == {"depth": 3, "optimizer": Optimizer(lr=1.0), "sizes": [1, 2]}
    device = torch.device("cpu")
    assert make_arguments(build, given, device) == {"settings": Settings(**given), "device": device}


def test_defaults_of_a_pydantic_model_are_those_of_the_function() -> None:
    assert function.default_settings(f"{__name__}:build") == {"optimizer": Optimizer(), "sizes": [1, 2]}


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (
            {},
            r"^the recipe needs the setting settings\.depth, and the configuration doesn't have it$",
            "add depth under [settings]: the number of layers",
        ),
        ({"dept": 1}, r"^unknown key settings\.dept$", "did you mean depth?"),
        ({"depth": "x"}, r"^settings\.depth = 'x': ", "the number of layers"),
        ({"depth": 1, "optimizer": {"rl": 1}}, r"^unknown key settings\.optimizer\.rl$", "known: lr"),
        ({"depth": 1, "optimizer": {"lr": 0}}, r"^settings\.optimizer\.lr = 0: .*than 0", "the learning rate"),
        ({"depth": 10}, r"^settings: Value error, too deep$", ""),
    ],
)
def test_a_wrong_setting_of_a_pydantic_model_is_one_line(settings: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        resolve_settings(build, settings)
    assert hint in refused.value.hint


def test_a_parameter_beside_the_model_of_all_settings_is_refused() -> None:
    def beside(settings: Settings, lr: float) -> Recipe:
        raise AssertionError((settings, lr))

    with pytest.raises(RecipeError, match="the function takes `lr` beside `settings: Settings`") as refused:
        resolve_settings(beside, {"depth": 1})
    assert refused.value.hint == "make lr a field of Settings"


def test_a_model_of_another_parameter_is_one_setting() -> None:
    def nested(optimizer: Optimizer, lr: float = 1.0) -> Recipe:
        raise AssertionError((optimizer, lr))

    assert resolve_settings(nested, {"optimizer": {"lr": 2}}) == {"optimizer": Optimizer(lr=2.0), "lr": 1.0}


@pytest.mark.parametrize("annotation", ["torch.device", "'torch.device'"])
def test_the_device_is_no_setting(write_module, annotation: str) -> None:  # type: ignore[no-untyped-def]
    builder = function.find_program(
        write_module(f"import torch\ndef build(where: {annotation}, lr=0.1) -> 'Recipe': ...")
    )
    assert resolve_settings(builder, {}) == {"lr": 0.1}
    assert make_arguments(builder, {}, "here") == {"where": "here", "lr": 0.1}
    with pytest.raises(RecipeError, match=r"unknown key settings\.where"):
        resolve_settings(builder, {"where": "cpu"})


def test_a_loop_takes_settings_and_device_beside_its_run() -> None:
    def train(run: Run, settings: Settings, device: torch.device) -> None: ...

    assert annotations.takes_run(train)
    assert make_arguments(train, {"depth": 1}, "here") == {"settings": Settings(depth=1), "device": "here"}


def test_a_loop_without_parameters_has_all_settings_in_its_run() -> None:
    def train(run: Run) -> None: ...

    assert resolve_settings(train, {"any": 1}) == {"any": 1}
    assert make_arguments(train, {"any": 1}, "here") == {}
