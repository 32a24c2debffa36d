"""A save and a resume wait for a device that computes late, and a missing wait shows in the bytes.

`tests.support.late_kernels` describes the device.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.lives import Lives, lives

pytestmark = pytest.mark.slow

AT, STOP = 3, 6
# What a training says of a missing wait: after the first step, or at a save.
FOUND = ("exactly: it comes back with different elements", "is not finite; nothing was saved")


Compare = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def late() -> Iterator[Lives]:
    """Yield a process that has the device, and no thread of autograd, from which tests fork others."""
    with lives("tests.support.late_trainings:prepare") as started:
        yield started


@pytest.fixture
def compare(late: Lives, tmp_path: Path) -> Compare:
    """Return a function that trains a program on the CPU, on the late device, and there with a resume."""

    def call(program: str, fault: str = "", shares: int = 0, stop: int = STOP) -> "subprocess.CompletedProcess[str]":
        arguments = (str(tmp_path), program, min(AT, stop - 1), stop, shares, fault)
        return late.call("tests.support.late_trainings:compare", *arguments)

    return call


def read_ids(done: "subprocess.CompletedProcess[str]") -> set[str]:
    """Return the different content ids at the ends of the three trainings."""
    assert done.returncode == 0, done.stderr
    return {*json.loads(done.stdout)}


@pytest.mark.parametrize(
    "program",
    [
        "toy:toy",
        "varied:normalised",
        "ordinary:adversarial",
        "ordinary:target",
        "ordinary:tied",
        "late_loops:draws",
        "late_loops:averages_in_the_step",
        "late_loops:prefetches",
        "late_loops:trains_beside",
    ],
)
def test_a_run_on_a_late_device_has_the_bytes_of_the_cpu(compare: Compare, program: str) -> None:
    assert len(read_ids(compare(program))) == 1


def test_virtual_ranks_on_a_late_device_have_the_bytes_of_the_cpu(compare: Compare) -> None:
    assert len(read_ids(compare("shares:averaged", shares=2, stop=2))) == 1


@pytest.mark.parametrize("loop", ["averages_beside", "copies_out"])
def test_a_save_waits_for_every_stream(compare: Compare, loop: str) -> None:
    assert len(read_ids(compare(f"late_loops:{loop}"))) == 1


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("toy:toy", "copies without a wait"),
        ("toy:toy", "copies in a side stream"),
        ("late_loops:trains_beside", "copies in another thread"),
        ("toy:toy", "frees a tensor that a side stream copies"),
        ("late_loops:averages_beside", "doesn't wait for the device"),
        ("late_loops:copies_out", "doesn't wait for the device"),
        ("late_loops:prefetches", "lets no stream wait"),
    ],
)
def test_a_missing_wait_is_found(compare: Compare, program: str, fault: str) -> None:
    done = compare(program, fault)
    assert any(each in done.stderr for each in FOUND) or len({*json.loads(done.stdout)}) > 1, done.stderr


def test_a_read_of_the_devices_address_ends_the_process(compare: Compare) -> None:
    done = compare("toy:toy", "reads an address of the device")
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("loop", ["reuses_a_buffer", "frees_too_early"])
def test_memory_that_a_program_uses_again_too_early_is_found(compare: Compare, loop: str) -> None:
    assert len(read_ids(compare(f"late_loops:{loop}"))) > 1
