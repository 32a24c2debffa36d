"""`make test-gpus` runs the tests that this machine has enough GPUs for, and names the others."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.nvidia_smi import HOPPER, NO_DEVICES, Machine

FILE = "tests/holdfast/rank/test_sharded_ranks.py"


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.support.gpus", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def test_without_a_gpu_one_line_says_that_nothing_was_run(machine: Machine) -> None:
    machine(text=NO_DEVICES)
    done = run(FILE)
    (line,) = done.stdout.splitlines()
    assert line.startswith("no GPU is visible here (nvidia-smi shows none to this process; torch ")
    assert line.endswith("so no test was run")


@pytest.mark.slow
def test_tests_that_need_more_gpus_are_skipped_by_name(machine: Machine) -> None:
    machine(*[HOPPER] * 4, visible="3,1")
    done = run("--setup-plan", "-q", "-rs", FILE, "tests/holdfast/keeping/test_retention.py")
    started = {line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if f" {FILE}::" in line}
    assert "test_a_resumed_training_ends_on_the_same_bytes[2]" in started
    assert "test_killed_in_any_phase_of_a_save_a_run_ends_on_the_same_bytes" in started
    for name in (
        "test_a_resumed_training_ends_on_the_same_bytes[4]",
        "test_tensors_cut_over_two_dimensions_of_ranks_have_the_same_bytes",
    ):
        assert name not in started
        assert f"{name} needs 4 GPUs, and this machine has 2" in done.stdout
    assert "test_retention" not in done.stdout
