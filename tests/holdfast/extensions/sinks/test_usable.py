"""Sinks that can't be used are refused before anything is trained, and no library is loaded to find out."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import live
from holdfast.config import load_config
from holdfast.errors import ConfigError
from holdfast.extensions.sinks.classes import CLASSES

RECIPE = 'recipe = "tests.support.toy:toy"\nrun = "toy"\n'


def load(folder: Path, sinks: str) -> Any:
    path = folder / "a.toml"
    path.write_text(f'{RECIPE}store = "{folder}/runs"\n[log]\nfolder = "{folder}/logs"\nsinks = {sinks}\n')
    return load_config(path)


def test_an_unknown_sink_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.sinks.*'tensorbord'") as caught:
        load(tmp_path, '["tensorbord"]')
    assert all(name in str(caught.value) for name in CLASSES)
    assert "\n" not in str(caught.value)


def test_a_sink_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.sinks names a sink twice"):
        load(tmp_path, '["wandb", "wandb"]')


def test_a_missing_library_is_refused_before_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(ConfigError, match="wandb is not installed") as caught:
        live(load(tmp_path, '["wandb"]'))
    assert caught.value.hint == "pip install 'holdfast-train[wandb]'"
    assert not (tmp_path / "runs").exists()


def test_an_attempt_imports_no_library_of_a_sink() -> None:
    code = "import sys, holdfast.attempt, holdfast.rank.serving; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"wandb", "tensorboard"} & {*loaded}
