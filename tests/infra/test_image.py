"""Tests of infra/image: which engine it takes, and what it says if there is none. The engines are stand-ins."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

WORKS = "exit 0"
FAILS = 'echo "Cannot connect to the Docker daemon" >&2; exit 1'
NO_BUILDX = 'case "$1" in buildx) exit 1; esac'
IS_PODMAN = 'case "$1" in --version) echo "podman version 4.3.1"; esac'


def choose(folder: Path, **engines: str) -> "subprocess.CompletedProcess[str]":
    """Ask infra/image for its engine on a machine with these commands."""
    for name, script in engines.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "dirname").symlink_to(shutil.which("dirname") or "")
    command: list[Any] = [shutil.which("bash"), ROOT / "infra" / "image", "--engine"]
    environment = {name: value for name, value in os.environ.items() if name != "ENGINE"} | {"PATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ({"docker": WORKS, "podman": WORKS}, "docker"),
        ({"podman": WORKS}, "podman"),
        ({"docker": FAILS, "podman": WORKS}, "podman"),
        ({"docker": NO_BUILDX, "podman": WORKS}, "podman"),
        ({"docker": IS_PODMAN, "podman": WORKS}, "podman"),
    ],
    ids=["both", "podman alone", "docker without its engine", "docker without buildx", "podman as docker"],
)
def test_an_engine_that_can_build_is_taken(engines: dict[str, str], chosen: str, tmp_path: Path) -> None:
    done = choose(tmp_path, **engines)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / chosen}\n"), done.stderr


def test_no_engine_is_one_line_and_a_hint(tmp_path: Path) -> None:
    done = choose(tmp_path)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == "error: an image needs docker or podman, and neither is on the PATH"
    assert hint.startswith("hint: apt-get install podman")


def test_an_engine_that_does_not_work_says_why(tmp_path: Path) -> None:
    done = choose(tmp_path, docker=FAILS)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'docker'} doesn't work here: Cannot connect to the Docker daemon\n"
