"""Tests of the command ``new``: its starting points are the examples of the docs, which other tests train and prove."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import app, run_app
from holdfast.cli.starting import TEMPLATES
from holdfast.config import load_config
from holdfast.testing import assert_resumes
from tests.project.test_readme import blocks

PAGES = {"recipe": "README.md", "loop": "your-own-loop.md", "trainer": "trainer.md", "lightning": "lightning.md"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_code(text: str) -> list[str]:
    """Return the lines of Python code without docstring, comments and blank lines."""
    lines = text.splitlines()
    return [line for line in lines if line and not line.lstrip().startswith(("#", '"""'))]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_starting_point_is_the_docs_example(folder: Path, kind: str) -> None:
    assert run_app(app, ["new", "mine", f"--{kind}"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["mine.py", "mine.toml"]
    code = (folder / "mine.py").read_text()
    assert read_code(code) == read_code(blocks(PAGES[kind], "python")[0])
    assert code.count("#") >= 4
    config = load_config(folder / "mine.toml")
    file, _, function = config.recipe.partition(":")
    assert (file, config.run) == ("mine.py", "mine")
    assert function in {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}


def test_a_slurm_job_comes_with_it(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A real Slurm takes such a file in tests/holdfast/rank/test_slurm.py."""
    assert run_app(app, ["new", "mine", "--slurm"]) == 0
    lines = (folder / "mine.sbatch").read_text().splitlines()
    assert len(lines) == 7
    assert lines[-1].startswith("srun --ntasks-per-node=1 --kill-on-bad-exit=1 ")
    assert lines[-1].endswith("train mine.toml --set compute.nodes=slurm --set compute.ranks=all")
    assert "sbatch mine.sbatch" in capfd.readouterr().out


def test_without_an_option_it_is_a_recipe(folder: Path) -> None:
    assert run_app(app, ["new", "mine"]) == 0
    assert "-> Recipe:" in (folder / "mine.py").read_text()


def test_the_next_commands_can_be_copied(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = str(Path(sys.executable).with_name("holdfast"))
    for path, expected in (("", command), (str(Path(command).parent), "holdfast")):
        monkeypatch.setenv("PATH", path)
        name = f"mine{bool(path):d}"
        subprocess.run([command, "new", name], check=True)
        assert f"train it with  {expected} train {name}.toml\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_starting_point_resumes() -> None:
    assert run_app(app, ["new", "mine"]) == 0
    assert_resumes("mine.toml", kills=1, steps=6)


@pytest.mark.parametrize("taken", ["mine.py", "mine.toml"])
def test_what_exists_is_not_overwritten(folder: Path, taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / taken).write_text("mine")
    assert run_app(app, ["new", "mine"]) == 1
    assert f"{taken} exists" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [taken]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["../mine"], "'../mine' can't be the name of both a run and a file"),
        (["mine", "--loop", "--trainer"], "found --loop and --trainer"),
        (["torch"], "torch is the name of a Python package"),
        (["json", "--loop"], "json is the name of a Python package"),
    ],
)
def test_wrong_use_writes_nothing(
    folder: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["new", *arguments]) == 1
    assert expected in capsys.readouterr().err
    assert not list(folder.iterdir())
