"""A configuration is read completely, or refused with the name of a field."""

import itertools
import json
import math
import operator
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.config import ChunkLength, Mesh, Resume, RunConfig, load_config, parse_config
from holdfast.config.hints import MEANT, RESUMES
from holdfast.config.loading import _known_keys
from holdfast.errors import ConfigError
from holdfast.recipe.function import default_settings

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


def test_a_name_that_no_listing_shows_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run = 'a\.tmp-1': a name with \.tmp- marks an unfinished write"):
        load_config(path, ["run=a.tmp-1"])


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
        ("chunk = 'weekly'", "chunk = 'weekly': expected \"auto\", or a table with steps or epochs", ""),
        ("chunk.steps = 0", 'chunk.steps = 0: expected a number of steps, at least 1, or "auto"', ""),
        ("[determinism]\nmode = 'loose'", "determinism.mode = 'loose': Input should be 'strict' or 'fast'", ""),
        ("[resume]\nstop_within_s = 0", "resume.stop_within_s = 0", ""),
        ("where = '-'", "where = '-': expected letters, digits, '.', '_', '-' and spaces, and", ""),
        ("[log]\nproject = 'a b'", "log.project = 'a b': expected letters, digits, '.', '_' and '-', at most 100", ""),
    ],
)
def test_wrong_setting_is_named(path: Path, text: str, message: str, hint: str) -> None:
    path.write_text(MINIMAL + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert caught.value.hint == hint
    assert isinstance(caught.value, ValueError)


def test_code_in_place_of_its_configuration_is_refused(path: Path) -> None:
    path.write_text(MINIMAL)
    code = path.with_suffix(".py")
    code.write_text("import torch\n")
    with pytest.raises(ConfigError, match="is not TOML") as caught:
        load_config(code)
    assert caught.value.hint == f"did you mean {path}?"


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


@pytest.mark.parametrize(
    ("auto_steps", "stops"),
    [
        (4, [5, 10, 15, 20, 25, 30, 35]),  # two equal chunks in an epoch
        (6, [5, 10, 15, 20, 25, 30, 35]),
        (9, [10, 20, 30, 35]),
        (14, [10, 20, 30, 35]),
        (16, [20, 35]),  # two epochs at once; the run ends with 35
        (1000, [35]),
    ],
)
def test_automatic_chunks_end_with_an_epoch_where_their_length_allows(auto_steps: int, stops: list[int]) -> None:
    assert walk(ChunkLength(steps="auto"), auto_steps, 35) == stops


@pytest.mark.parametrize("auto_steps", [1, 3, 7, 50, 120])
@pytest.mark.parametrize("steps_per_epoch", [1, 9, 100])
def test_an_automatic_chunk_has_about_the_desired_length(auto_steps: int, steps_per_epoch: int) -> None:
    length, stops = ChunkLength(steps="auto"), [0]
    while stops[-1] < 1000 * steps_per_epoch - 3 * auto_steps:
        stops.append(length.next_stop(stops[-1], steps_per_epoch, 1000 * steps_per_epoch, auto_steps))
    lengths = [stop - start for start, stop in itertools.pairwise(stops)]
    assert math.floor(auto_steps * 2 / 3) <= min(lengths)
    assert max(lengths) <= math.ceil(auto_steps * 3 / 2)


def test_automatic_chunks_end_with_every_epoch_if_configured() -> None:
    assert walk(ChunkLength(steps="auto", epochs=1), 1000, 35) == [10, 20, 30, 35]
    assert walk(ChunkLength(steps="auto", epochs=2), 1000, 35) == [20, 35]


def test_automatic_chunks_end_where_retention_keeps_a_checkpoint() -> None:
    keep = {"keep_every": 4, "keep_every_steps": 25}
    config = parse_config({"recipe": "m:f", "run": "a", "epochs": 10, "chunk": "auto", "retention": keep})
    stops = [0]
    while stops[-1] < 100:
        stops.append(config.next_stop(stops[-1], 10, 1000))
    assert stops == [0, 25, 40, 50, 75, 80, 100]


def walk(length: ChunkLength, auto_steps: int, total_steps: int) -> list[int]:
    """Return the last steps of the chunks of a run with ten steps an epoch."""
    stops = [0]
    while stops[-1] < total_steps:
        stops.append(length.next_stop(stops[-1], 10, total_steps, auto_steps))
    return stops[1:]


def test_an_automatic_length_is_a_word_or_a_table_and_is_no_part_of_the_identity(path: Path) -> None:
    fixed = load_config(path, ["chunk.steps=4"])
    path.write_text(MINIMAL + "[chunk]\nsteps = 4\n")
    word = load_config(path, ["chunk=auto"])
    path.write_text(MINIMAL + '[chunk]\nsteps = "auto"\n')
    assert word == load_config(path) == RunConfig.model_validate_json(word.model_dump_json())
    assert word.chunk == ChunkLength(steps="auto")
    assert word.identity == fixed.identity


def test_the_form_asks_for_a_length_as_it_asks_for_the_rest() -> None:
    """Prefect makes the form from the schema: fields from a table."""
    schema = RunConfig.model_json_schema()
    assert schema["properties"]["chunk"]["$ref"] == "#/$defs/ChunkLength"
    fields = schema["$defs"]["ChunkLength"]["properties"]
    assert list(fields) == ["steps", "epochs"]


def test_a_chunk_that_begins_late_has_the_usual_end() -> None:
    assert ChunkLength(epochs=2).next_stop(13, 10, 100) == 20


@pytest.mark.parametrize(
    "store", ["s3://AKIA1:hunter2secret@bucket/runs", "az://container/runs?sig=hunter2secret", "gs://u:hunter2secret@b"]
)
def test_a_store_url_with_credentials_is_refused_and_not_shown(store: str) -> None:
    with pytest.raises(ConfigError, match="contains credentials") as caught:
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


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lr=0.1", "did you mean settings.lr?"),
        ("learning_rate=0.1", "did you mean settings.lr?"),
        ("optimizer.lr=0.1", "did you mean settings.lr?"),
        ("checkpoint.dir=x", "did you mean store?"),
        ("output_dir=x", "did you mean store?"),
        ("scheduler.type=cosine", "did you mean settings.schedule?"),
        ("checkpoint.retention=3", "did you mean retention?"),
        ("save_total_limit=3", "did you mean retention.keep_last?"),
        ("save-steps=3", "did you mean chunk.steps?"),
        ("retention_policy.keep_last=3", "did you mean retention.keep_last?"),
        ("reproducibility.cudnn_deterministic=true", "did you mean determinism.mode?"),
        ("num_train_epochs=3", "did you mean epochs?"),
        ("devices=2", "did you mean compute.ranks?"),
        ("resume_from=x", "leave it out: the same command continues the run from its last verified checkpoint"),
        ("resume.from=x", "leave it out: the same command continues the run from its last verified checkpoint"),
        ("epoch=3", "did you mean epochs?"),
        ("checkpoint.part_byte=3", "did you mean checkpoint.part_bytes?"),
        ("ranks=2", "did you mean compute.ranks? If it is a setting of your recipe, write settings.ranks"),
        ("rank=2", "did you mean compute.ranks? If it is a setting of your recipe, write settings.rank"),
        ("training.ranks=2", "did you mean compute.ranks?"),
        (
            "mode=max",
            "did you mean determinism.mode or retention.keep_best.mode? "
            "If it is a setting of your recipe, write settings.mode",
        ),
        ("width=3", "did you mean settings.width? Settings of your recipe belong under [settings]"),
    ],
)
def test_a_key_of_another_tool_gives_a_hint_to_holdfasts_name(path: Path, key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config(path, [key])
    assert caught.value.hint == hint


def test_every_foreign_name_leads_to_a_setting_and_is_not_one() -> None:
    known = set(_known_keys(RunConfig))
    recipe = {f"settings.{name}" for name in default_settings("holdfast.recipes.language:language")}
    assert set(MEANT.values()) <= known | recipe
    assert not {*MEANT, *RESUMES} & known


def test_descriptions_hold_no_markup() -> None:
    """Prefect's form drops what looks like an HTML tag: sources.<module> was shown as "sources."."""
    assert "<" not in json.dumps(RunConfig.model_json_schema())


@pytest.mark.parametrize(
    ("earlier", "chunk"),
    [
        ({"auto": True, "steps": None, "epochs": 2}, ChunkLength(steps="auto", epochs=2)),
        ({"auto": True}, ChunkLength(steps="auto")),
        ({"auto": False, "steps": 4, "epochs": None}, ChunkLength(steps=4)),
        ({"auto": False}, ChunkLength()),
    ],
)
def test_an_automatic_length_of_an_earlier_version_is_read(earlier: dict[str, object], chunk: ChunkLength) -> None:
    assert parse_config({"recipe": "m:f", "run": "a", "chunk": earlier}).chunk == chunk


def test_settings_of_earlier_versions_are_read_with_a_line_on_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records of runs and scheduled deployments have them, too."""
    earlier = {
        "parity": {"every": 3}, "report": {"every": 7.0}, "supervision": {"backoff_s": 9.0, "max_failures": 5},
        "preemption": {"metadata_url": None, "cloud": "aws", "drain_file": "/drain"},
        "compute": {"ray_address": "auto", "ranks": 2},
        "retention": {"keep_last": 4, "max_epochs": 9, "debris_after_s": 60.0},
    }  # fmt: skip
    config = RunConfig.model_validate({"recipe": "m:f", "run": "a", **earlier})
    assert (config.checkpoint.read_back_every, config.log.report_every_s) == (3, 7)
    assert (config.supervision.max_failures, config.compute.ranks, config.retention.keep_last) == (5, 2, 4)
    assert config.resume.drain_file == "/drain"
    on_record = {"preemption": {"cloud": "auto", "drain_file": None}}
    assert RunConfig.model_validate({"recipe": "m:f", "run": "a", **on_record}).resume == Resume()
    file = tmp_path / "a.toml"
    file.write_text('recipe = "m:f"\nrun = "a"\nparity.every = 3\nsupervision.if_running = "refuse"\n')
    assert load_config(file).checkpoint.read_back_every == 3
    assert [each.message for each in caplog.records] == [
        f"{file}: parity.every is now checkpoint.read_back_every",
        f"{file}: supervision.if_running is gone: a second train command watches the running attempt",
    ]
    with pytest.raises(ConfigError, match=r"unknown key parity"):
        parse_config({"recipe": "m:f", "run": "a", "parity": {"often": 1}})


@pytest.mark.parametrize(
    ("earlier", "advice", "field", "left"),
    [
        (
            'log.observers = ["m:Own", "holdfast.attempt.published:KillCostFile"]',
            "log.observers: holdfast.attempt.published:KillCostFile is gone: log.metrics exports the age of the "
            "newest commit: the training time that a kill would cost",
            "log.observers", ("m:Own",),
        ),
        (
            "near = {most_bytes = 9, every_steps = 50}",
            "near.every_steps is gone: a shorter chunk.steps saves more often, to near.folder first",
            "near.most_bytes", 9,
        ),
        (
            'on_spike = "skip"\nskip = "7"',
            "on_spike is gone: a run names the command that explains a jump of its loss; holdfast skip leaves the "
            "batch out",
            "skip", "7",
        ),
        (
            'log.sinks = ["wandb", "mlflow"]',
            "log.sinks: mlflow is gone: holdfast docs metrics shows a class to copy, which continues the same curve as "
            "my_mlflow:MLflow",
            "log.sinks", ("wandb",),
        ),
    ],
)  # fmt: skip
def test_a_retired_setting_is_read_with_a_line_that_says_what_takes_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, earlier: str, advice: str, field: str, left: object
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f'recipe = "m:f"\nrun = "a"\n{earlier}\n')
    config = load_config(file)
    assert [each.message for each in caplog.records] == [f"{file}: {advice}"]
    assert operator.attrgetter(field)(config) == left
    given = {"recipe": "m:f", "run": "a", **tomllib.loads(earlier)}
    assert RunConfig.model_validate(given) == config, "as in a record of the run"


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ({"ranks": 4, "mesh": {"shard": 3}}, "mesh has 3 ranks, but the run has 4"),
        (
            {"ranks": 4, "nodes": 2, "rendezvous": "a:1234", "mesh": {"shard": 2, "tensor": 2}},
            "mesh has 4 ranks, but the run has 8",
        ),
        ({"ranks": 4, "mesh": {"shard": 4}, "parallel": "ddp"}, 'needs parallel = "fsdp", found parallel = "ddp"'),
        ({"ranks": 4, "mesh": {"shard": 3}, "virtual_ranks": 8}, "mesh has 3 ranks, but the run has 4"),
        ({"ranks": 4, "mesh": {"shard": 0}}, "compute.mesh.shard = 0"),
        ({"ranks": 4, "mesh": {"pipeline": 4}}, "compute.mesh.pipeline"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(compute: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"recipe": "m:f", "run": "a", "compute": {"parallel": "fsdp"} | compute})
    assert message in str(caught.value)


def test_a_mesh_is_part_of_the_identity() -> None:
    def identity(**mesh: int) -> Any:
        compute = {"ranks": 4, "parallel": "fsdp"} | ({"mesh": mesh} if mesh else {})
        return parse_config({"recipe": "m:f", "run": "a", "compute": compute}).identity

    assert identity() != identity(shard=4)
    assert identity(shard=4) != identity(shard=2, replicate=2) != identity(shard=2, tensor=2)


def test_with_virtual_ranks_the_identity_has_only_the_mesh_s_tensor_dimension() -> None:
    def identity(ranks: int, **mesh: int) -> Any:
        compute = {"ranks": ranks, "parallel": "fsdp", "virtual_ranks": 8} | ({"mesh": mesh} if mesh else {})
        return parse_config({"recipe": "m:f", "run": "a", "compute": compute}).identity

    assert identity(4, shard=2, replicate=2) == identity(2, shard=2) == identity(3)
    assert identity(4, shard=2, tensor=2) == identity(2, tensor=2) == identity(8, replicate=2, shard=2, tensor=2)
    assert identity(4, tensor=4) != identity(4, shard=2, tensor=2) != identity(4)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [(2, (1, 1, 2)), (4, (2, 1, 2)), (6, (1, 3, 2)), (12, (2, 3, 2))],
)
def test_a_mesh_of_other_ranks_keeps_its_tensor_dimension(ranks: int, found: tuple[int, ...]) -> None:
    mesh = Mesh(replicate=2, shard=2, tensor=2).resize(ranks)
    assert (mesh.replicate, mesh.shard, mesh.tensor) == found


def test_with_virtual_ranks_a_mesh_follows_the_number_of_ranks() -> None:
    compute = {"ranks": 2, "parallel": "fsdp", "virtual_ranks": 8, "mesh": {"tensor": 2}}
    config = parse_config({"recipe": "m:f", "run": "a", "compute": compute})
    several = [config.with_ranks(4), config.placed(2, "a:1"), config.attached(1, 4)]
    for each in several:
        assert each.compute.mesh == Mesh(shard=2, tensor=2)
        assert RunConfig.model_validate_json(each.model_dump_json()) == each
    fixed = config.model_copy(update={"compute": config.compute.model_copy(update={"virtual_ranks": 0})})
    with pytest.raises(ConfigError, match="mesh has 2 ranks, but the run has 4"):
        fixed.with_ranks(4)


def test_a_mesh_of_ranks_that_its_tensor_dimension_does_not_divide_is_refused() -> None:
    for ranks in (1, 3):
        with pytest.raises(ConfigError, match=f"compute.ranks = {ranks}: compute.mesh.tensor = 2 doesn't divide it"):
            Mesh(tensor=2).resize(ranks)


def in_a_cell() -> None: ...


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("file", ["", "/notebooks/train.py"])
def test_a_recipe_of_this_program_alone_is_refused_before_ranks_start(
    is_named: bool, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's kernel has no file; a script's name is known."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    if file:
        monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
    monkeypatch.setattr(in_a_cell, "__module__", "__main__")
    expected = 'set recipe = "train.py:in_a_cell"' if file else r"begin the cell with %%writefile in_a_cell\.py, .*"
    with pytest.raises(ConfigError, match=expected):
        parse_config({"recipe": "__main__:in_a_cell" if is_named else in_a_cell, "run": "a"})


def test_a_function_is_given_by_its_name() -> None:
    with pytest.raises(ConfigError, match='expected the name of the function: recipe = "json:dumps"'):
        parse_config({"recipe": json.dumps, "run": "a"})
    with pytest.raises(ConfigError, match="Input should be a valid string"):
        parse_config({"recipe": lambda: None, "run": "a"})


def test_the_form_has_a_title_for_each_field_and_no_markup() -> None:
    """Prefect's form calls a field without a title "Field", and shows backticks as they are."""
    schema = RunConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        assert "`" not in section.get("description", "")
        for name, field in section.get("properties", {}).items():
            assert field.get("title"), name
            assert "`" not in field.get("description", ""), name
