"""What a command uses of a run's records if its reader names only the run, or a configuration of their own."""

from pathlib import Path

import pytest

from holdfast.config import RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe.trust import BY_DEFAULT, Trust, is_declared, is_readers, opens
from holdfast.recipes.texts import PROTOCOLS, read_files
from holdfast.store import open_store
from holdfast.store.modules import place_current

BUNDLED = ["language:language", "digits:digits"]
HARMLESS = ["", "stdlib", "linear", "adamw 2", "0.5", "a: b", "x-y_z", "1,2", "(1, 2)", "why?", "50%", "[UNK]"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project's folder the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def recorded(**fields: object) -> RunConfig:
    return RunConfig.model_validate({"recipe": "holdfast.recipes.language:language", "run": "r", **fields})


@pytest.mark.parametrize("recipe", BUNDLED)
def test_a_bundled_recipe_is_accepted(project: Path, recipe: str) -> None:
    name = f"holdfast.recipes.{recipe}"
    assert BY_DEFAULT.choose(recorded(recipe=name), str(project / "runs")).recipe == name


OTHERS = ["holdfast.cli.app:app", "holdfast.recipes.texts:read_files", "torch:load", "os:system"]


@pytest.mark.parametrize("recipe", OTHERS)
def test_other_code_of_holdfast_and_installed_code_is_not(project: Path, recipe: str) -> None:
    with pytest.raises(RecipeError, match="the run's records name the recipe"):
        BY_DEFAULT.choose(recorded(recipe=recipe), str(project / "runs"))


@pytest.mark.parametrize("text", HARMLESS)
def test_a_setting_that_opens_nothing_is_accepted(project: Path, text: str) -> None:
    assert not opens(text)
    assert BY_DEFAULT.choose(recorded(settings={"a": [{"b": text}], "n": 3}), "runs").settings["n"] == 3


@pytest.mark.parametrize(
    "text",
    [
        *(f"{protocol}://x" for protocol in (*PROTOCOLS, "reference", "ftp", "sftp", "zip", "github", "hf", "data")),
        "simplecache::file", "reference://*::file:///x", "/etc/passwd", "../x", "a/b", "~", "~root", ".", "..", "$HOME",
        "env:HOME", "os:system", "//host/share", r"\\host\share", "data.txt", "inner", "*.txt", "d?ta.txt", "x\0y",
    ],
)  # fmt: skip
def test_a_setting_that_could_open_something_is_refused(project: Path, text: str) -> None:
    (project / "data.txt").touch()
    (project / "inner").mkdir()
    for settings in ({"data": text}, {"data": ["x", {"deep": text}]}, {"data": {text: 1}}):
        with pytest.raises(RecipeError, match=r"the run's records say settings\.data"):
            BY_DEFAULT.choose(recorded().model_copy(update={"settings": settings}), "runs")
    accepted = Trust(records=True).choose(recorded().model_copy(update={"settings": {"data": text}}), "runs")
    assert accepted.settings == {"data": text}


@pytest.mark.parametrize("run", ["s3://other/run", "/other/run", "other/run", "here"])
def test_another_runs_weights_are_opened_only_on_the_same_store(project: Path, run: str) -> None:
    (project / "here").mkdir()
    with pytest.raises(RecipeError, match=r"the run's records say init_from\.run"):
        BY_DEFAULT.choose(recorded(init_from={"run": run}), "runs")
    assert BY_DEFAULT.choose(recorded(init_from={"run": "parent"}), "runs").init_from


def test_records_start_no_more_ranks_than_a_machine_bears(project: Path) -> None:
    nodes = {"nodes": 1024, "rendezvous": "x:1"}
    for compute in ({"ranks": 1024}, {"ranks": 2} | nodes):
        with pytest.raises(RecipeError, match=r"the run's records say (1024|2048) ranks"):
            BY_DEFAULT.choose(recorded(compute=compute), "runs")
    accepted = {"ranks": 2, "virtual_ranks": 2, "loader_workers": 1024} | nodes
    assert BY_DEFAULT.choose(recorded(compute=accepted), "runs").compute.loader_workers < 1024


def test_of_a_record_nothing_is_used_that_only_an_attempt_opens(project: Path) -> None:
    fields = {
        "log": {"folder": "/x", "sinks": ["a:B"], "observers": ["a:B"], "metrics": "otlp:http://x:1"},
        "near": {"folder": "/x"}, "signing_key": "/x", "compute": {"rendezvous": "x:1"},
        "resume": {"trusted_keys": ["/x"], "drain_file": "/x"},
    }  # fmt: skip
    found = BY_DEFAULT.choose(recorded(**fields), "runs").model_dump_json()
    assert not {'"/x', "a:B", "x:1"} & {text for text in ('"/x', "a:B", "x:1") if text in found}


def test_the_readers_configuration_replaces_the_recorded_one(project: Path) -> None:
    own = recorded(settings={"data": "/mine/*.txt"})
    there = recorded(recipe="evil:evil", settings={"data": "/theirs"}, skip="3", signing_key="/x")
    assert Trust(config=own).choose(there, "runs") == own.model_copy(update={"skip": "3"})
    assert Trust(recipe="b:c", config=own).choose(there, "runs").recipe == "b:c"


DECLARING = {
    "plain": "from holdfast import Recipe\ndef made() -> Recipe: ...",
    "quoted": "def made() -> 'holdfast.Recipe': ...",
    "renamed": "from holdfast import Recipe as R\ndef made() -> R: ...",
    "attribute": "import holdfast as h\ndef made(run: h.Run): ...",
    "keyword": "from holdfast import Run\ndef made(*, run: 'Run', lr=1) -> None: ...",
    "class": "from holdfast import Recipe\nclass Base(Recipe): ...\nclass made(Base): ...",
    "partial": "def make(n) -> 'Recipe': ...\nmade = functools.partial(make, 3)",
    "object": "class Maker:\n    def __call__(self) -> 'Recipe': ...\nmade = Maker()",
    "guarded": "try:\n    import x\nexcept ImportError:\n    def made() -> 'Recipe': ...",
    "imported": "from other import made",
    "imported under another name": "from other import original as made",
}
UNDECLARED = {
    "script": "def made(): ...",
    "other name": "def other() -> 'Recipe': ...",
    "nested": "def outer():\n    def made() -> 'Recipe': ...",
    "string": "made = 'Recipe'",
    "broken": "def made(-> Recipe: ...",
    "elsewhere": "from torch import made",
    "itself": "from own import made",
}


@pytest.mark.parametrize("source", [*DECLARING, *UNDECLARED])
def test_only_a_module_that_declares_the_recipe_is_imported(project: Path, source: str) -> None:
    (project / "other.py").write_text("def made() -> 'Recipe': ...\ndef original() -> 'Recipe': ...\n")
    (project / "own.py").write_text((DECLARING | UNDECLARED)[source])
    for recipe in ("own:made", "own.py:made"):
        assert is_readers(recipe)
        assert is_declared(recipe) == (source in DECLARING)


@pytest.mark.parametrize(
    "recipe", ["tools.wipe:main", "tools.wipe.more:main", "tools.wipe.more.still:main", "tools:main"]
)
def test_a_script_of_the_readers_is_never_imported(project: Path, recipe: str) -> None:
    """Importing a module below a script, which isn't there, would execute the script first."""
    (project / "tools").mkdir()
    (project / "tools" / "__init__.py").touch()
    (project / "tools" / "wipe.py").write_text("def main(): ...\n")
    with pytest.raises(RecipeError, match="has no recipe of this name"):
        BY_DEFAULT.choose(recorded(recipe=recipe), "runs")


@pytest.mark.parametrize("is_package", [False, True])
def test_a_link_to_code_outside_of_the_project_is_not_the_readers(project: Path, is_package: bool) -> None:
    outside = project.parent / "outside"
    outside.mkdir()
    (outside / "model.py").write_text("def made() -> 'Recipe': ...\n")
    (project / "linked").symlink_to(outside) if is_package else (project / "linked.py").symlink_to(outside / "model.py")
    recipe = "linked.model:made" if is_package else "linked:made"
    assert not is_readers(recipe)
    (outside / "run").mkdir()
    (outside / "run" / "run.json").touch()
    with pytest.raises(RecipeError, match="whose file is in a store"):
        Trust(records=True).choose(recorded(recipe=recipe), str(project / "runs"))


@pytest.mark.parametrize("data", ["reference://*::file:///x", "simplecache::s3://x", "ftp://x", "github://x"])
def test_data_of_other_protocols_is_refused_unopened(data: str) -> None:
    with pytest.raises(RecipeError, match=r"(refused|joined by ::)"):
        read_files(data)


def test_a_chained_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="several URLs joined by ::"):
        open_store("s3://bucket/runs::file:///x")


def test_the_current_folder_comes_after_pythons_modules_and_in_a_store_last(project: Path) -> None:
    path = [str(project), "/usr/lib/python3", "/usr/lib/python3/site-packages", "/late"]
    assert place_current(path) == ["/usr/lib/python3", str(project), *path[2:]]
    (project / "run").mkdir()
    (project / "run" / "run.json").touch()
    assert place_current(path) == [*path[1:], str(project)]
