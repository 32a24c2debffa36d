"""What the README says is so."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import EXIT_CODES
from holdfast.config import load_config
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.conftest import COMMAND_WITHIN_S, ROOT

README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """What stands between fences; every second part is inside of one."""
    inside = re.split(r"^```", README, flags=re.M)[1::2]
    return [text for name, _, text in (part.partition("\n") for part in inside) if name == language]


def commands() -> list[list[str]]:
    lines = [line for block in blocks("") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith((".venv/bin/", "make "))]


def test_make_targets_exist() -> None:
    targets = [command[1] for command in commands() if command[0] == "make"]
    assert targets == ["train", "test", "up", "down"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_file_tree_is_the_repository() -> None:
    tree = blocks("")[-1]
    folder, listed = "", set()
    for line in tree.splitlines():
        name, _, comment = line.strip().partition(" ")
        assert comment.strip(), line
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        path = (folder if line.startswith(" ") else "") + name
        assert (ROOT / path).exists(), path
        listed.add(path)
    found = {
        path.relative_to(ROOT).as_posix()
        for room in ("deployments", "flows", "tasks", "holdfast")
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".md", ".toml", ".yaml"} and path.name != "__init__.py"
    }
    assert found == {path for path in listed if path.startswith(("deployments/", "flows/", "tasks/", "holdfast/"))} - {
        "deployments/", "flows/", "tasks/", "holdfast/",
    }  # fmt: skip


def test_exit_codes_are_the_documented_ones() -> None:
    for code in (0, 1, 2, 3, 130, 143):
        assert re.search(rf"\b{code}\b", EXIT_CODES)
        assert re.search(rf"\b{code}\b", README.split("Every command ends")[1].split("\n\n")[0])
    assert HoldfastError.exit_code == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some twenty commands, a minute where nothing else runs
def test_your_own_model_in_twenty_lines(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    recipe, program = blocks("python")
    assert len([line for line in recipe.splitlines() if line]) <= 22
    (tmp_path / "my_model.py").write_text(recipe)
    (tmp_path / "my_model.toml").write_text(blocks("toml")[0])
    (tmp_path / "kept.toml").write_text(f"{blocks('toml')[0]}\n{blocks('toml')[1]}")
    own = commands()[[command[1] for command in commands()].index("-m") :]  # from the first of its own on
    for command in (each for each in own if each[0] != "make"):  # test_local is about those
        module = ["-m", "holdfast.cli"] if command[0].endswith("holdfast") else []
        done = subprocess.run(
            [sys.executable, *module, *command[1:]],
            cwd=tmp_path, env=os.environ | prefect_api, capture_output=True, text=True,
            timeout=COMMAND_WITHIN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
        if "epochs=25" in command:
            assert "step 1550, epoch 25" in done.stdout
            accuracy = re.search(r"accuracy +([0-9.]+)", done.stdout)
            assert accuracy
            assert float(accuracy[1]) > 0.9
    assert Journal(open_store(str(tmp_path / "elsewhere")), "spirals").newest()
    assert load_config(tmp_path / "kept.toml").retention.keep_best
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=os.environ | prefect_api, capture_output=True, text=True,
        timeout=COMMAND_WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.match(r"[0-9a-f]{64} \[", done.stdout)
