"""A configuration may name only annotated recipes, and only recipes and stores that the operator allows."""

import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Recipe
from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe.function import build_recipe, find_program, returns_recipe
from holdfast.recipe.permission import RECIPES, check_recipe
from holdfast.store import open_store
from holdfast.store.permission import STORES

if TYPE_CHECKING:
    from nowhere import Recipe as Later  # type: ignore[import-not-found]


def annotated() -> Recipe:
    raise NotImplementedError


def quoted() -> "Recipe":
    raise NotImplementedError


def for_checkers_only() -> "Later.Recipe":
    raise NotImplementedError


class Narrower(Recipe):
    pass


def narrower() -> Narrower:
    raise NotImplementedError


class Builder:
    def __call__(self) -> Recipe:
        raise NotImplementedError


@functools.wraps(annotated)
def wrapped(*arguments: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    "builder",
    [annotated, quoted, for_checkers_only, narrower, Narrower, Builder(), functools.partial(annotated), wrapped],
)
def test_a_callable_annotated_as_a_recipe_is_one(builder: Any) -> None:
    assert returns_recipe(builder)


@pytest.mark.parametrize(
    "builder", [os.system, os._exit, print, eval, dict, lambda: None, functools.partial(os.system), open_store]
)
def test_a_callable_without_the_annotation_is_no_recipe(builder: Any) -> None:
    assert not returns_recipe(builder)


def test_a_recipe_is_called_only_if_annotated(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(RecipeError, match="'os:system' is refused") as refused:
        build_recipe("os:system", {"command": f"touch {mark}"})
    assert refused.value.hint == "annotate the function: def system(...) -> Recipe, or def system(run: holdfast.Run)"
    assert not mark.exists()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a package of two modules that leave a mark when they are imported."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "marking"
    package.mkdir()
    mark = f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'mark').touch()\n"
    for name in ("__init__", "own", "ownership"):
        (package / f"{name}.py").write_text(mark + "def build() -> 'Recipe': ...\ndef other() -> 'Recipe': ...\n")
    yield "marking"
    for name in [name for name in sys.modules if name.partition(".")[0] == "marking"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("allowed", "recipe", "is_allowed"),
    [
        ("marking", "marking.own:build", True),
        ("marking.own", "marking.own:build", True),
        (" holdfast , marking.own:build ", "marking.own:build", True),
        ("marking.own:build", "marking.own:other", False),
        ("marking.own", "marking.ownership:build", False),
        ("marking.own:bui", "marking.own:build", False),
        ("mark", "marking.own:build", False),
        ("", "marking.own:build", False),
    ],
)
def test_recipes_are_allowed_by_prefix_and_others_are_not_imported(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, recipe: str, is_allowed: bool
) -> None:
    monkeypatch.setenv(RECIPES, allowed)
    if is_allowed:
        assert find_program(recipe).__name__ == "build"
    else:
        with pytest.raises(RecipeError, match="is not allowed on this machine") as refused:
            find_program(recipe)
        assert refused.value.hint.startswith(f"{RECIPES} allows")
        assert refused.value.hint.endswith("operator can add the recipe to that variable")
    assert (tmp_path / "mark").exists() is is_allowed


@pytest.mark.parametrize(
    ("allowed", "recipe", "is_allowed"),
    [
        ("{folder}/", "{folder}/mine.py:build", True),
        ("{folder}/mine.py", "{folder}/mine.py:build", True),
        ("{folder}/mine.py:build", "{folder}/mine.py:build", True),
        ("{folder}/mine.py", "{folder}/mine.py:other", True),
        ("{folder}/mine.py:build", "{folder}/mine.py:other", False),
        ("{folder}/inner/", "{folder}/inner/../mine.py:build", False),
        ("{folder}/min", "{folder}/mine.py:build", False),
        ("mine", "{folder}/mine.py:build", False),
    ],
)
def test_files_are_allowed_by_folder_without_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, recipe: str, is_allowed: bool
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.setenv(RECIPES, allowed.format(folder=tmp_path))
    if is_allowed:
        check_recipe(recipe.format(folder=tmp_path))
    else:
        with pytest.raises(RecipeError, match="is not allowed on this machine"):
            check_recipe(recipe.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("allowed", "store", "is_allowed"),
    [
        ("runs", "runs", True),
        ("runs", "{here}/runs/team", True),
        ("{here}/runs/", "file://{here}/runs", True),
        ("/", "anywhere", True),
        ("memory://a", "memory://a/b", True),
        ("runs", "runs-evil", False),
        ("runs", "runs/../../etc", False),
        ("runs", "link", False),
        ("runs", "runs/link/deep", False),
        ("runs", "~/runs", False),
        ("runs", "", False),
        ("memory://a", "memory://ab", False),
        ("memory://a", "memory://a/../b", False),
        ("memory://a", "a", False),
        ("s3://team/runs", "s3://team", False),
        ("s3://team", "s3://team-evil/runs", False),
        ("s3://team", "s3a://other", False),
        ("", "runs", False),
    ],
)
def test_stores_are_allowed_by_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, store: str, is_allowed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "runs" / "link").symlink_to("/etc")
    monkeypatch.setenv(STORES, allowed.format(here=tmp_path))
    if is_allowed:
        open_store(store.format(here=tmp_path))
    else:
        with pytest.raises(ConfigError, match="is not allowed on this machine") as refused:
            open_store(store.format(here=tmp_path))
        assert refused.value.hint.startswith(f"{STORES} allows")
        assert refused.value.hint.endswith("operator can add the store to that variable")


def test_a_bucket_has_one_spelling(monkeypatch: pytest.MonkeyPatch, bucket: str) -> None:
    monkeypatch.setenv(STORES, bucket)
    open_store(f"{bucket.replace('s3://', 's3a://')}/runs")


def test_proofs_and_replays_keep_their_scratch_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORES, "runs")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        open_store(folder)
        Path(folder).chmod(0o755)  # mkdtemp makes folders with mode 0o700
        with pytest.raises(ConfigError):
            open_store(folder)
    (tmp_path / "holdfast-link").symlink_to("/etc")
    for other in (tmp_path, tmp_path / "holdfast-link", tmp_path / "holdfast-none"):
        with pytest.raises(ConfigError):
            open_store(str(other))
