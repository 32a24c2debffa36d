"""Tests of what runs the tests: .ci/run, its system packages, and the workflows that call it."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yaml"
# What the jobs of a release may do besides reading.
MAY = {"publish": {"attestations": "write", "id-token": "write"}, "announce": {"contents": "write"}}
MAKES = {"setup", "lint", "check-infra", "dist", "site", "test-full", "test-image"}


def read(path: Path) -> dict[str, Any]:
    """Read a workflow. YAML 1.1 takes its key ``on`` for a boolean."""
    known: dict[Any, Any] = yaml.safe_load(path.read_text("utf-8"))
    return known | {"on": known.pop(True, known.get("on"))}


def list_steps() -> list[Any]:
    return [
        pytest.param(step, id=f"{path.stem}-{number}")
        for path in WORKFLOWS
        for job in read(path)["jobs"].values()
        for number, step in enumerate(job["steps"])
    ]


def list_commands(text: str) -> list[str]:
    """Return the programs and make targets that a script of the workflow names."""
    targets = [f"make {target}" for target in re.findall(r"\bmake ([\w-]+)", text)]
    return targets + re.findall(r"(?<![\w./])\.?[\w.-]*/[\w./-]+", text)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_do_little_and_not_for_ever(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is (path != RELEASE)
    assert "pull_request_target" not in workflow["on"]
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 90
        assert job.get("permissions") == (MAY.get(name) if path == RELEASE else None)
        assert re.search(r"-\d", job["runs-on"])  # a version: `latest` changes


@pytest.mark.parametrize("step", list_steps())
def test_an_action_is_pinned_by_its_commit(step: dict[str, Any]) -> None:
    if "uses" in step:
        assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}", step["uses"])
        lines = [line for path in WORKFLOWS for line in path.read_text("utf-8").splitlines() if step["uses"] in line]
        (version,) = {line.partition(step["uses"])[2] for line in lines}
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", version)


@pytest.mark.parametrize("step", list_steps())
def test_a_step_runs_what_there_is(step: dict[str, Any]) -> None:
    for command in list_commands(step.get("run", "")):
        if command.startswith("make "):
            target = command.removeprefix("make ")
            subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
        elif not command.startswith(".venv/"):  # make makes these
            assert os.access(ROOT / command, os.X_OK), command
    _, _, hashed = step.get("with", {}).get("key", "").partition("hashFiles")
    for name in re.findall(r"'([\w./-]+)'", hashed):
        assert (ROOT / name).exists(), name


def test_commands_of_a_step_are_found() -> None:
    assert list_commands("make all && .ci/run; infra/image x") == ["make all", ".ci/run", "infra/image"]


@pytest.mark.parametrize("name", ["ci.yaml", "release.yaml"])
def test_a_workflow_runs_ci_run(name: str) -> None:
    jobs = read(ROOT / ".github" / "workflows" / name)["jobs"].values()
    assert [step for job in jobs for step in job["steps"] if step.get("run") == ".ci/run"]


def test_a_release_is_a_tag_that_passed_and_that_a_person_approved() -> None:
    workflow = read(RELEASE)
    jobs = workflow["jobs"]
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert (jobs["publish"]["needs"], jobs["publish"]["environment"]) == ("build", "release")
    assert jobs["announce"]["needs"] == "publish"
    assert "cache" not in str(jobs["build"])


@pytest.mark.parametrize("name", MAY)
def test_a_job_that_may_write_runs_nothing_of_the_repository(name: str) -> None:
    steps = read(RELEASE)["jobs"][name]["steps"]
    assert not [step for step in steps if "checkout" in step.get("uses", "")]
    assert not [command for step in steps for command in list_commands(step.get("run", ""))]


def test_ci_run_makes_everything() -> None:
    text = (ROOT / ".ci" / "run").read_text("utf-8")
    lines = re.findall(r"^make ([\w -]+)", text, re.M)
    assert {target for line in lines for target in line.split() if re.match("[a-z]", target)} == MAKES
    for script in ("run", "prepare"):
        assert os.access(ROOT / ".ci" / script, os.X_OK)
        assert "set -euo pipefail" in (ROOT / ".ci" / script).read_text("utf-8")


def test_missing_packages_are_installed(tmp_path: Path) -> None:
    """A stand-in for apt-get notes what it is asked for. One package can't be had."""
    shell = prepare(tmp_path, "there  sh\ngone   no-such-command /no/such*\n# a comment\n\nnever  no-such-command\n")
    (tmp_path / "bin" / "apt-get").write_text(
        '#!/bin/sh\necho "$@" >> "$0.asked"\ncase "$*" in *never) exit 100;; esac\n'
    )
    (tmp_path / "bin" / "apt-get").chmod(0o755)
    done = shell()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "installing gone never\ncan't be installed: never\n"
    asked = (tmp_path / "bin" / "apt-get.asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["-qq", "gone", "never"]


def test_without_apt_get_ci_goes_on(tmp_path: Path) -> None:
    done = prepare(tmp_path, "gone no-such-command\n")()
    assert (done.returncode, done.stdout) == (0, "missing, and not installed by this user here: gone\n")
    assert prepare(tmp_path, "there sh\n")().stdout == ""


def prepare(folder: Path, packages: str) -> Any:
    """Return a call of .ci/prepare with a list of packages and commands of its own."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "prepare").write_text((ROOT / ".ci" / "prepare").read_text("utf-8"))
    (folder / "packages").write_text(packages)
    (folder / "bin" / "sudo").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (folder / "bin" / "sudo").chmod(0o755)
    for name in ("dirname", "sh", "true"):
        shutil.copy(shutil.which(name) or "", folder / "bin" / name)
    environment = {"PATH": str(folder / "bin")}
    command = ["/bin/bash", folder / "prepare"]
    return lambda: subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
