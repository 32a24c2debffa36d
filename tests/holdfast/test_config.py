"""A configuration is read whole, or refused with the field's name."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from holdfast.config import ChunkLength, RunConfig, load_config, parse_config
from holdfast.errors import ConfigError

MINIMAL = 'recipe = "module:function"\nrun = "a"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(MINIMAL)
    return path


def test_overrides_are_toml_and_bare_words_are_strings(path: Path) -> None:
    config = load_config(path, ["epochs=3", "settings.lr=3e-4", "settings.a.b=[1, 2]", "run=b", 'store="x y"'])
    assert (config.epochs, config.run, config.store) == (3, "b", "x y")
    assert config.settings == {"lr": 3e-4, "a": {"b": [1, 2]}}


@pytest.mark.parametrize("override", ["epochs", "=3", "a..b=1", "run.x=1"])
def test_malformed_override_is_refused(path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_config(path, [override])


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("reticpe = 1", "unknown key reticpe", "did you mean recipe?"),
        ("[retention]\nkeep_lats = 1", "unknown key retention.keep_lats", "did you mean retention.keep_last?"),
        ("epochs = 0", "epochs = 0: Input should be greater than or equal to 1", ""),
        ("epochs = 'many'", "epochs = 'many'", ""),
        ("[chunk]\nsteps = 1\nepochs = 1", "give steps or epochs, not both", ""),
        ("[determinism]\nmode = 'loose'", "determinism.mode = 'loose': Input should be 'strict' or 'fast'", ""),
        ("[resume]\nstop_within_s = 0", "resume.stop_within_s = 0", ""),
    ],
)
def test_wrong_setting_is_named(path: Path, text: str, message: str, hint: str) -> None:
    path.write_text(MINIMAL + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert caught.value.hint == hint
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("run", ["", "../a", "a/b", ".hidden", "a b", "a" * 101])
def test_run_name_is_one_folder(run: str) -> None:
    with pytest.raises(ConfigError, match="run ="):
        parse_config({"recipe": "m:f", "run": run})


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="recipe is missing"):
        parse_config({"run": "a"})


@pytest.mark.parametrize("seed", [None, 0, 1234])
def test_default_seed(seed: int | None) -> None:
    assert parse_config({"recipe": "m:f", "run": "a", "seed": seed}).seed == 1234


def test_identity_is_what_changes_the_mathematics() -> None:
    base = RunConfig(recipe="m:f", run="a")
    same = {
        "run": "b",
        "store": "c",
        "epochs": 9,
        "chunk": {"steps": 1},
        "retention": {"keep_last": 9},
        "log": {"every": 1, "folder": "d"},
        "resume": {"stop_within_s": 1},
        "compute": {"device": "cpu", "loader_workers": 2},
    }
    for name, value in same.items():
        assert parse_config(base.model_dump() | {name: value}).identity == base.identity, name
    other = {
        "recipe": "m:g",
        "seed": 2,
        "determinism": {"threads": 2},
        "compute": {"ranks": 2},
        "settings": {"lr": 1},
    }
    for name, value in other.items():
        assert parse_config(base.model_dump() | {name: value}).identity != base.identity, name


@pytest.mark.parametrize(
    ("length", "stops"),
    [
        (ChunkLength(steps=4), [4, 8, 10, 14, 18, 20, 24, 25]),
        (ChunkLength(steps=100), [10, 20, 25]),
        (ChunkLength(), [10, 20, 25]),
        (ChunkLength(epochs=2), [20, 25]),
        (ChunkLength(epochs=9), [25]),
    ],
)
def test_chunks_end_with_their_epoch_or_the_run(length: ChunkLength, stops: list[int]) -> None:
    found, step = [], 0
    while step < 25:
        step = length.next_stop(step, 10, 25)
        found.append(step)
    assert found == stops


def test_a_chunk_that_begins_late_ends_where_it_would_have() -> None:
    assert ChunkLength(epochs=2).next_stop(13, 10, 100) == 20


@pytest.mark.parametrize(
    "store", ["s3://AKIA1:hunter2secret@bucket/runs", "az://container/runs?sig=hunter2secret", "gs://u:hunter2secret@b"]
)
def test_a_store_with_credentials_in_it_is_refused_and_not_repeated(store: str) -> None:
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        parse_config({"recipe": "m:f", "run": "a", "store": store})
    assert "hunter2secret" not in str(caught.value)
    with pytest.raises(ValidationError) as invalid:
        RunConfig(recipe="m:f", run="a", store=store)
    assert "hunter2secret" not in str(invalid.value)


def test_retention_is_checked() -> None:
    policy = {"keep_last": 2, "keep_best": {"metric": "accuracy", "mode": "max"}}
    config = parse_config({"recipe": "m:f", "run": "a", "retention": policy})
    assert config.retention.keep_best
    assert config.retention.keep_best.count == 1
    with pytest.raises(ConfigError, match="unknown key retention") as caught:
        parse_config({"recipe": "m:f", "run": "a", "retention": {"keep_best": {"metrc": "accuracy"}}})
    assert caught.value.hint == "did you mean retention.keep_best.metric?"
