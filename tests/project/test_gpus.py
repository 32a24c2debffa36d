"""`make test-gpus` measures first, then runs the tests that this machine has enough GPUs for, and names the others."""

import os
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.support import gpus
from tests.support.gpu_facts import FACTS, Fact
from tests.support.lives import Lives
from tests.support.nvidia_smi import HOPPER, NO_DEVICES, Machine

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
