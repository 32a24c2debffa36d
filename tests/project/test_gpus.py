"""`make test-gpus` measures first, then runs the tests that this machine has enough GPUs for, and names the others."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, has_mark
from tests.support import gpus
from tests.support.device import VARIABLE
from tests.support.gpu_facts import FACTS, Fact
from tests.support.lives import Lives
from tests.support.nvidia_smi import HOPPER, NO_DEVICES, Machine
from tests.support.surroundings import is_hidden

FILE = "tests/holdfast/rank/test_sharded_ranks.py"


def run(*options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.support.gpus", *options]
    environment = os.environ | variables
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)


def test_without_a_gpu_one_line_says_that_nothing_was_run(machine: Machine) -> None:
    machine(text=NO_DEVICES)
    done = run(FILE)
    (line,) = done.stdout.splitlines()
    assert line.startswith("no GPU is visible here (nvidia-smi shows none to this process; torch ")
    assert line.endswith("so no test was run")


def test_without_torchs_build_for_cuda_one_line_says_what_to_install(machine: Machine) -> None:
    machine(HOPPER)
    (line,) = run(FILE).stdout.splitlines()
    assert "is built without CUDA, so no test was run: install torch's build for CUDA in .venv" in line
    version = torch.__version__.partition("+")[0]
    assert f"-m pip install --constraint constraints.txt torch=={version}+cu" in line, "pip keeps any other build"


def test_a_driver_that_torch_can_not_use_is_named_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(HOPPER)
    monkeypatch.setattr(gpus, "count_gpus", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert gpus.find_problem().startswith("nvidia-smi lists 1 GPU, but torch sees none: ")


def test_every_file_that_runs_first_has_tests_for_gpus() -> None:
    assert [name for name in gpus.FIRST if not has_mark(ROOT / "tests" / name, "gpus")] == []


@pytest.mark.slow
def test_tests_that_need_more_gpus_are_skipped_by_name(machine: Machine) -> None:
    machine(*[HOPPER] * 4, visible="3,1")
    first = "tests/holdfast/recipes/test_killed.py"
    done = run("--setup-plan", "-q", "-rs", FILE, first, "tests/holdfast/keeping/test_retention.py")
    lines = [line.split()[0] for line in done.stdout.splitlines() if f" {FILE}::" in line or f" {first}::" in line]
    assert lines[0].startswith(first)
    started = {line.partition("::")[2] for line in lines}
    assert "test_a_resumed_training_ends_on_the_same_bytes[2]" in started
    assert "test_killed_in_any_phase_of_a_save_a_run_ends_on_the_same_bytes" in started
    for name in (
        "test_a_resumed_training_ends_on_the_same_bytes[4]",
        "test_tensors_cut_over_two_dimensions_of_ranks_have_the_same_bytes",
    ):
        assert name not in started
        assert f"{name} needs 4 GPUs, and this machine has 2" in done.stdout
    assert "test_retention" not in done.stdout


@pytest.mark.slow
def test_after_ten_minutes_no_further_test_begins(machine: Machine) -> None:
    machine(*[HOPPER] * 2)
    done = run("--setup-plan", "-q", "-rs", FILE, HOLDFAST_TEST_WITHIN_S="-1")
    assert "the time of make test-gpus is over" in done.stdout
    assert "passed" not in done.stdout


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, fact in FACTS.items() if not fact.needs_gpu])
def test_what_needs_no_gpu_is_measured_on_a_cpu(nursery: Lives, name: str) -> None:
    done = nursery.call("tests.support.gpu_facts:main", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.usefixtures("no_gpu")
def test_what_is_not_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "FACTS", {name: fact for name, fact in FACTS.items() if fact.needs_gpu})
    head, rule, *lines = gpus.measure_facts(time.monotonic() + 600)
    assert (head, rule) == ("| measured | result | seconds |", "|---|---|---|")
    assert len(lines) == len(gpus.FACTS)
    assert all("not measured: it needs a GPU" in line for line in lines)
    assert all("the time is over" in line for line in [*gpus.measure_facts(time.monotonic() - 1)][2:])


def test_what_fails_or_hangs_is_a_line_of_the_table() -> None:
    def fact(within_s: float) -> Fact:
        return Fact("", lambda: "", needs_gpu=False, within_s=within_s)

    assert gpus.measure("no_such_fact", fact(60)) == "FAILED: KeyError: 'no_such_fact'"
    assert gpus.measure("hold", fact(0.1)) == "FAILED: no result within 0.1 s"


@pytest.mark.parametrize(
    ("when", "outcome", "expected"),
    [
        ("call", "passed", "| `test_a.py::test_b[x/y]` | passed | 3 |\n"),
        ("call", "failed", "| `test_a.py::test_b[x/y]` | FAILED: RuntimeError: no GPU | 3 |\n"),
        ("setup", "failed", "| `test_a.py::test_b[x/y]` | FAILED: RuntimeError: no GPU | 3 |\n"),
        ("setup", "passed", ""),
        ("setup", "skipped", ""),
    ],
)
def test_each_result_is_a_line_of_the_table_at_once(tmp_path: Path, when: str, outcome: str, expected: str) -> None:
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="RuntimeError: no GPU\nand more"))
    report: Any = pytest.TestReport("tests/test_a.py::test_b[x|y]", ("", 0, ""), {}, outcome, crash, when, duration=3)  # type: ignore[arg-type]
    table = tmp_path / "gpus.md"
    gpus.note_result(report, table)
    assert (table.read_text() if table.exists() else "") == expected


def test_the_tests_see_what_make_test_gpus_tells_them() -> None:
    assert not any(map(is_hidden, (VARIABLE, gpus.TABLE_VARIABLE, gpus.UNTIL_VARIABLE)))


def test_a_test_on_gpus_ends_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()
    item: Any = SimpleNamespace(add_marker=lambda mark: limits.append(mark.args[0]))
    monkeypatch.setenv(gpus.UNTIL_VARIABLE, str(time.time() + 40))
    gpus.limit_time(item)
    monkeypatch.setattr(gpus, "ON_GPUS", True)
    gpus.limit_time(item)
    assert len(limits) == 1
    assert 30 < limits[0] <= 40


@pytest.mark.parametrize(("count", "cores", "abreast"), [(1, 16, "4"), (1, 6, "2"), (1, 2, ""), (8, 128, "")])
def test_tests_that_can_share_one_gpu_run_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, count: int, cores: int, abreast: str
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: count)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert gpus.count_abreast()[1:2] == ([abreast] if abreast else [])
