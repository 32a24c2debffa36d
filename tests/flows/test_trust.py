"""Whoever may write to a store can't make a reader of its runs execute anything: the reader says what to train."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.journal import ConfigRecord
from holdfast.store.modules import python_command
from tests.conftest import COMMAND_WITHIN_S, IS_SOAK, ROOT, Engine, RunFlow
from tests.support.forging import plant, rename_recipe
from tests.support.lives import Lives

pytestmark = pytest.mark.slow

LINE = "the run's records name the recipe"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Path:
    """Return a finished run of two commits."""
    engine = Engine(tmp_path_factory.mktemp("trusted"), {}, nursery=nursery)
    engine.finish("epochs=2", "chunk.steps=10", "retention.keep_last=99")
    return engine.run_folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Path:
    """Return a run that trained different bytes."""
    engine = Engine(tmp_path_factory.mktemp("other"), {}, nursery=nursery)
    engine.finish("epochs=2", "chunk.steps=10", "retention.keep_last=99", "seed=2")
    return engine.run_folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, in a store in the project's folder."""
    return shutil.copytree(run, tmp_path / "project" / "copies" / "toy")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return the file that the forger's code writes when it is imported."""
    return tmp_path / "executed"


COMMANDS = (["audit"], ["evaluate"], ["compare", "--replay"])


def call(engine: Engine, command: list[str], run: Path, other: Path, *options: str) -> tuple[int, str]:
    """Call a command that trains from records, in the current folder; return its exit code and what it printed."""
    runs = [str(run), str(other)] if command[0] == "compare" else [str(run)]
    arguments = [command[0], *runs, *command[1:], *options]
    assert engine.nursery
    process = engine.nursery.start_command("tests.support.forked:command", *arguments, environment=dict(os.environ))
    out, err = process.communicate(timeout=COMMAND_WITHIN_S)
    assert "Traceback" not in err
    return process.returncode or 0, out + err


def in_the_store(store: Path, mark: Path) -> str:
    return f"{plant(store, mark)}:toy"


def in_the_run(store: Path, mark: Path) -> str:
    return f"{plant(store / 'toy', mark)}:toy"


def by_a_link(store: Path, mark: Path) -> str:
    (store.parent / "linked.py").symlink_to(plant(store, mark))
    return f"{store.parent / 'linked.py'}:toy"


def as_a_module(store: Path, mark: Path) -> str:
    plant(store / "inner", mark)
    return f"{store.name}.inner.evil:toy"


def as_a_package(store: Path, mark: Path) -> str:
    """Return the name of a module in the project, behind a link in a package that is in the store."""
    plant(store, mark, "__init__")
    (store.parent / "own").mkdir()
    (store.parent / "own" / "model.py").write_text("from tests.support.toy import toy\n")
    (store / "inner").symlink_to(store.parent / "own")
    return f"{store.name}.inner.model:toy"


def elsewhere(store: Path, mark: Path) -> str:
    return f"{plant(mark.parent / 'elsewhere', mark)}:toy"


PLACES = (in_the_store, in_the_run, by_a_link, as_a_module, as_a_package, elsewhere)


@pytest.mark.parametrize("place", PLACES if IS_SOAK else PLACES[::2])
def test_no_command_executes_what_a_record_names(
    engine: Engine,
    other: Path,
    copied: Path,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Path, Path], str],
) -> None:
    monkeypatch.chdir(copied.parent.parent)
    recipe = place(copied.parent, mark)
    rename_recipe(copied, recipe)
    for command in COMMANDS:
        code, printed = call(engine, command, copied, other)
        assert (code, mark.exists()) == (2 if command[0] == "compare" else 1, False), printed
        assert f"{LINE} '{recipe}'" in printed
    is_in_store = place is not elsewhere
    code, printed = call(engine, ["audit"], copied, other, "--trust-records")
    assert (code, mark.exists()) == ((1, False) if is_in_store else (0, True)), printed


def test_a_reader_names_the_recipe(engine: Engine, run: Path, copied: Path, mark: Path) -> None:
    rename_recipe(copied, in_the_store(copied.parent, mark))
    code, printed = call(engine, ["audit"], copied, run, "--recipe", "tests.support.toy:toy")
    assert (code, mark.exists()) == (0, False), printed
    assert "replayed to the same bytes" in printed


def test_a_configuration_that_is_not_the_fingerprints_is_refused_and_a_problem(
    engine: Engine, run: Path, copied: Path, mark: Path
) -> None:
    recipe = in_the_store(copied.parent, mark)
    for path in [*(copied / "configs").iterdir(), copied / "config.snapshot.json"]:
        record = ConfigRecord.from_bytes(path.read_bytes(), path.name)
        changed = record.model_copy(update={"config": record.config | {"recipe": recipe}})
        path.write_bytes(changed.to_bytes())
    conflict = f"the record's configuration has recipe = '{recipe}', but its fingerprint is of 'tests.support.toy:toy'"
    code, printed = call(engine, ["audit"], copied, run)
    assert (code, mark.exists()) == (2, False), printed
    assert conflict in printed
    done = engine.command("verify", str(copied), "--json")
    problems = json.loads(done.stdout)["problems"]
    assert done.returncode == 2
    assert len(problems) == 2
    assert all(conflict in problem for problem in problems)


def test_an_archive_executes_nothing(engine: Engine, run: Path, copied: Path, mark: Path, tmp_path: Path) -> None:
    recipe = in_the_run(copied.parent, mark)
    rename_recipe(copied, recipe)
    done = engine.command("pack", str(copied), str(tmp_path / "run.tar"))
    assert done.returncode == 0, done.stderr
    done = engine.command("unpack", str(tmp_path / "run.tar"), str(tmp_path / "unpacked"))
    assert done.returncode == 0, done.stderr
    code, printed = call(engine, ["evaluate"], tmp_path / "unpacked" / "toy", run)
    assert (code, mark.exists()) == (1, False), printed
    assert f"{LINE} '{recipe}'" in printed


def test_an_audit_of_a_store_executes_nothing_and_goes_on(
    copied: Path, run: Path, mark: Path, run_flow: RunFlow
) -> None:
    recipe = in_the_store(copied.parent, mark)
    rename_recipe(copied, recipe)
    shutil.copytree(run, copied.parent / "honest")
    done = run_flow("audit", store=str(copied.parent))
    assert (done.returncode, mark.exists()) == (3, False), done.stderr
    assert f"of run toy was not audited: {LINE} '{recipe}', whose file is in a store" in done.stderr
    assert "run honest: commit" in done.stderr


def test_in_a_folder_of_a_store_nothing_is_trained(
    engine: Engine, copied: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python searches the current folder first, so a file beside the run could take the place of any module."""
    plant(copied.parent, mark, "yaml")
    monkeypatch.chdir(copied.parent)
    code, printed = call(engine, ["audit"], copied, copied)
    assert (code, mark.exists()) == (1, False), printed
    assert "the current folder is in a store" in printed


def test_a_run_of_a_bundled_recipe_is_audited_by_its_name_and_by_its_configuration(
    nursery: Lives, tmp_path: Path
) -> None:
    """README's first commands, on the recipe of `make train`, in a folder outside of the repository."""
    config = "[settings]\nsteps_per_epoch = 4\nwidth = 16\nlayers = 1\nheads = 2\ncontext = 16\nsample_bytes = 0\n"
    head = 'recipe = "holdfast.recipes.language:language"\nrun = "language"\nepochs = 2\n'
    (tmp_path / "my.toml").write_text(head + config)
    (tmp_path / "other.toml").write_text(head + config.replace("[settings]", "[settings]\nlr = 0.5"))
    for arguments, exit_code, said in (
        (("train", "my.toml"), 0, "is complete"),
        (("audit", "runs/language", "--random", "2"), 0, "replayed to the same bytes"),
        (("evaluate", "runs/language"), 0, "the metrics equal those recorded in training"),
        (("explain", "runs/language", "3"), 0, "the bits on record"),
        (("audit", "my.toml"), 0, "replayed to the same bytes"),
        (
            ("audit", "my.toml", "--set", "settings.lr=0.5"),
            0,
            "settings.lr differs: the run was trained with 0.003, and",
        ),
        (("compare", "my.toml", "other.toml", "--replay"), 0, "equal: my.toml"),
        (("audit", "runs/language", "--set", "seed=2"), 1, "--set changes a configuration"),
    ):
        process = nursery.start_command(
            "tests.support.forked:command", *arguments, environment=dict(os.environ), folder=tmp_path
        )
        out, err = process.communicate(timeout=COMMAND_WITHIN_S)
        assert (process.returncode, said in out + err) == (exit_code, True), out + err


STARTS = re.compile(r"sys\.executable,(?! \"-P\")")


def test_every_process_of_a_command_starts_without_the_current_folder() -> None:
    """The next test shows what that keeps out of a rank."""
    sources = [path for room in ("holdfast", "tasks") for path in (ROOT / room).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in sources if STARTS.search(path.read_text("utf-8"))}
    assert found == {"holdfast/attempt/attaching.py"}, "os.execve takes the program's path beside its command"


@pytest.mark.parametrize("module", ["holdfast", "json", "fsspec"] if IS_SOAK else ["fsspec"])
def test_a_rank_in_a_store_imports_no_module_of_it(engine: Engine, run: Path, tmp_path: Path, module: str) -> None:
    """As `cd STORE; holdfast audit CONFIGURATION`, with ranks that Python starts."""
    store, mark = shutil.copytree(run.parent, tmp_path / "store"), tmp_path / "executed"
    (store / f"{module}.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    (tmp_path / "own.toml").write_text('recipe = "holdfast.recipes.digits:digits"\nrun = "new"\nstore = "."\n')
    done = subprocess.run(
        python_command("-m", "holdfast.cli", "train", "../own.toml", "--set", "settings.nothing=1"),
        check=False, capture_output=True, cwd=store, encoding="utf-8", env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, mark.exists()) == (1, False), done.stderr
