"""Tests of the project's promises: layers, public names, light imports, dependencies and set-up."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.project.test_words import ROOMS, find_files

BIN = Path(sys.executable).parent
MOST_ATTRIBUTES, MOST_IMPORTS = 20, 20
LARGE_CLASSES = {
    "holdfast/training/build.py: Training": 24,
}
WIDE_MODULES = {"holdfast/attempt/attempt.py": 25, "holdfast/training/build.py": 26}


def run(*command: str | Path, cwd: Path = ROOT, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    wide = os.environ | {"COLUMNS": "200"}  # import-linter wraps its report at the terminal's width
    return subprocess.run(
        command, cwd=cwd, env=wide, capture_output=True, text=True, input=text, check=False, timeout=COMMAND_WITHIN_S
    )


def test_recipes_import_only_what_a_users_own_may() -> None:
    allowed = {"holdfast", "holdfast.errors", "holdfast.recipes", "holdfast.schedule"}
    hints = "holdfast.terminal.distribution"  # a hint at an extra, which a user's own spells out
    for path in ROOT.glob("holdfast/recipes/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert not [each.name for each in node.names if each.name.partition(".")[0] == "holdfast"], path
            elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("holdfast."):
                names = {each.name for each in node.names}
                assert node.module == hints or ".".join(str(node.module).split(".")[:2]) in allowed, (path, node.module)
                assert node.module != "holdfast" or names <= {*holdfast.__all__}, (path, names)


@pytest.mark.parametrize(
    "module",
    ["holdfast", "holdfast.cli", "holdfast.attempt", "holdfast.recipe", "holdfast.rank.spawn", "flows.command"],
)
def test_light_imports(module: str) -> None:
    program = f"import {module}, sys; print([name for name in ('torch', 'prefect', 's3fs') if name in sys.modules])"
    assert run(sys.executable, "-c", program).stdout.strip() == "[]"


def test_ranks_import_neither_prefect_nor_what_few_runs_need() -> None:
    rare = {"forgotten_state", "sharded", "shards", "virtual_ranks", "collecting", "own_loop", "near", "nodes", "slurm"}
    program = "import holdfast.rank.serving, sys; print(*sys.modules)"
    loaded = run(sys.executable, "-c", program).stdout.split()
    assert ("torch" in loaded, "prefect" in loaded) == (True, False)
    assert not [name for name in loaded if name.startswith("holdfast.") and rare & {*name.split(".")}]
    assert "holdfast.journal.journal" not in loaded, "only an attempt writes the journal"


def test_ruff_finds_prefect_in_the_engine() -> None:
    planted = "from prefect import flow\n\n__all__ = ['flow']\n"
    found = run(BIN / "ruff", "check", "--stdin-filename", "holdfast/planted.py", "-", text=planted)
    assert found.returncode != 0
    assert "the engine never imports prefect" in found.stdout
    allowed = run(BIN / "ruff", "check", "--stdin-filename", "tasks/planted.py", "-", text=planted.replace("'", '"'))
    assert "TID251" not in allowed.stdout


@pytest.mark.parametrize(
    ("place", "planted", "contract"),
    [
        ("holdfast/planted.py", "import tasks.hooks", "flows > tasks > holdfast"),
        ("tasks/planted.py", "import flows.train", "flows > tasks > holdfast"),
        ("holdfast/planted.py", "def f():\n    import prefect", "the engine never imports prefect"),
        ("flows/planted.py", "from holdfast.cli import app", "flows call the engine, not its command line"),
        (
            "holdfast/state/planted.py",
            "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from holdfast.training import Training",
            "the engine's rooms import each other in one direction",
        ),
    ],
)
def test_layers_are_guarded(tmp_path: Path, place: str, planted: str, contract: str) -> None:
    for room in ("holdfast", "tasks", "flows"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert run(BIN / "lint-imports", "--no-cache", cwd=tmp_path).returncode == 0
    (tmp_path / place).write_text(planted + "\n")
    found = run(BIN / "lint-imports", "--no-cache", cwd=tmp_path)
    assert found.returncode != 0
    assert f"{contract} BROKEN" in found.stdout


def test_every_dependency_is_pinned() -> None:
    locks = [ROOT / "constraints.txt", ROOT / "tests" / "support" / "titan.txt"]
    pins = {name for lock in locks for name in re.findall(r"^([A-Za-z0-9._-]+)==", lock.read_text("utf-8"), re.M)}
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    groups = [project["project"]["dependencies"], *project["dependency-groups"].values(), *extras]
    needed = [entry for group in groups for entry in group]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", entry)[0]).lower() for entry in needed}  # type: ignore[index]
    assert names <= normal


def test_no_heavy_package_is_installed() -> None:
    names = {(distribution.name or "").lower() for distribution in importlib.metadata.distributions()}
    assert "torchvision" not in names
    if torch.version.cuda is None:
        assert not [name for name in names if name.startswith("nvidia-")]


def test_bytecode_is_compiled() -> None:
    """Without bytecode every process compiles torch and Prefect anew, which takes seconds."""
    assert list((Path(torch.__file__).parent / "__pycache__").glob("__init__.*.pyc"))


def test_only_the_engine_is_in_the_wheel(tmp_path: Path) -> None:
    built = run(BIN / "python", "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    listed = run(sys.executable, "-m", "zipfile", "--list", str(wheel)).stdout
    files = {line.split()[0] for line in listed.splitlines()[1:]}
    assert {"holdfast/recipes/digits.toml", "holdfast/recipes/language.toml"} <= files
    assert {name.split("/")[0] for name in files} == {"holdfast", f"holdfast_train-{holdfast.__version__}.dist-info"}


def test_flows_hold_functions_only() -> None:
    for path in ROOT.glob("flows/*.py"):
        assert not re.search(r"^\s*class ", path.read_text(), re.M), path


def test_prefect_gets_what_flows_and_tasks_log() -> None:
    """It sends the records of this logger, and its children, to the server: ``extra_loggers`` in pyproject.toml."""
    names = {
        name
        for path in find_files()
        if path.relative_to(ROOT).parts[0] in ("flows", "tasks")
        for name in re.findall(r"^log = logging.getLogger\((.*)\)$", path.read_text("utf-8"), re.M)
    }
    assert names
    assert not [name for name in names if not name.startswith('"holdfast.')]


def test_flows_and_tasks_are_no_packages() -> None:
    assert not [*ROOT.glob("flows/__init__.py"), *ROOT.glob("tasks/__init__.py")]


def test_no_class_holds_more_than_a_person_can_keep_in_mind() -> None:
    """Those that do are listed with their number of attributes, which may only shrink."""
    assert {name: count for name, count in find_attributes() if count > MOST_ATTRIBUTES} == LARGE_CLASSES


def test_no_module_imports_more_than_a_person_can_keep_in_mind() -> None:
    """Those that do are listed with their number of modules of ours, which may only shrink."""
    assert {name: count for name, count in find_imports() if count > MOST_IMPORTS} == WIDE_MODULES


def find_attributes() -> Iterator[tuple[str, int]]:
    """Yield each class with the number of attributes that its methods assign to ``self``."""
    for path in find_files():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                stores = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
                own = [each for each in stores if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"]
                yield f"{path.relative_to(ROOT)}: {node.name}", len({each.attr for each in own})


def find_imports() -> Iterator[tuple[str, int]]:
    """Yield each module with the number of modules of ours from which it imports."""
    for path in find_files():
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        yield str(path.relative_to(ROOT)), len([name for name in found if name.split(".")[0] in ROOMS])
