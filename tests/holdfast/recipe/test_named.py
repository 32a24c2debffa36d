"""Classes of the user's own that a setting names: they are imported only if they are what the setting takes."""

from pathlib import Path

import pytest

from holdfast.attempt import Observer
from holdfast.config import parse_config
from holdfast.errors import ConfigError
from holdfast.looking.sinks import Sink
from holdfast.recipe.named import check_class, import_class
from holdfast.recipe.permission import RECIPES
from holdfast.store import open_store
from holdfast.store.permission import STORES

CODE = """
import pathlib
from holdfast.attempt import Observer
from holdfast.store.memory import MemoryStore

pathlib.Path(__file__).with_suffix(".imported").touch()

class Mine(Observer):
    pass

class Store(MemoryStore):
    pass

class Broken(Store):
    def __init__(self, url):
        raise ZeroDivisionError("of its own")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module of this test's own into the current folder; return the file that tells that it was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that the path is as before after the test
    file = tmp_path / f"named_{tmp_path.name.replace('-', '_')}.py"
    file.write_text(CODE)
    return file.with_suffix(".imported")


def test_a_class_of_the_right_kind_is_imported(module: Path) -> None:
    assert issubclass(import_class("log.observers", f"{module.stem}:Mine", Observer), Observer)
    assert module.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}:Other", "can't be imported: AttributeError"),
        ("{module}:Mine", "is no Sink"),
        ("no_such_module:Mine", "there is no module no_such_module"),
        ("no.such:Mine", "there is no module no.such"),
        ("os:system", "is no Sink"),
    ],
)
def test_anything_else_is_refused(module: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_class("log.sinks", name.format(module=module.stem), Sink)


def test_what_the_operator_does_not_allow_is_not_imported(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECIPES, "holdfast.recipes")
    checks = (lambda name: check_class("log.sinks", name), lambda name: import_class("log.observers", name, Observer))
    for refused in checks:
        with pytest.raises(ConfigError, match=r"is not allowed on this machine"):
            refused(f"{module.stem}:Mine")
    monkeypatch.setenv(RECIPES, f"holdfast.recipes, {module.stem}")
    check_class("log.sinks", f"{module.stem}:Mine")
    assert not module.exists()


def test_a_store_that_names_code_is_opened_only_where_that_is_allowed(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its URL may come from a run's records, which others may write."""
    url = f"{module.stem}:Store://somewhere"
    for allowed in (None, "", "runs", f"{module.stem}:Other://"):
        if allowed is not None:
            monkeypatch.setenv(STORES, allowed)
        with pytest.raises(ConfigError, match=r"this machine"):
            open_store(url)
    assert not module.exists()
    monkeypatch.setenv(STORES, f"runs, {module.stem}:Store://, {module.stem}:Mine://")
    assert type(open_store(url)).__name__ == "Store"
    with pytest.raises(ConfigError, match=r"Mine is no Store") as refused:
        open_store(f"{module.stem}:Mine://somewhere")
    assert refused.value.hint == "class Mine(holdfast.store.Store): ..."


@pytest.mark.parametrize(
    ("scheme", "error"),
    [
        ("{module}:Other", "{module}:Other can't be imported: AttributeError"),
        ("{module}:Broken", "ZeroDivisionError: of its own"),
        ("no_such_module:Store", "there is no module no_such_module"),
    ],
)
def test_a_store_that_names_code_which_fails_is_one_clear_error(
    module: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, error: str
) -> None:
    scheme, error = (text.format(module=module.stem) for text in (scheme, error))
    monkeypatch.setenv(STORES, f"{scheme}://")
    with pytest.raises(ConfigError, match=rf"^store = '{scheme}://somewhere': {error}"):
        open_store(f"{scheme}://somewhere")


def test_a_configuration_names_them_as_it_names_a_recipe() -> None:
    fields = {"recipe": "m:f", "run": "a"}
    log = parse_config({**fields, "log": {"sinks": ["wandb", "mine.sinks:Csv"], "observers": ["mine:Printer"]}}).log
    assert (log.sinks, log.observers) == (("wandb", "mine.sinks:Csv"), ("mine:Printer",))
    for key, value in (("sinks", "wanndb"), ("sinks", "a/b.py:Csv"), ("observers", "mine")):
        with pytest.raises(ConfigError, match=rf"log.{key}"):
            parse_config({**fields, "log": {key: [value]}})
