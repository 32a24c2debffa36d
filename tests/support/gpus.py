"""``python -m tests.support.gpus [OPTION ...]``: the first ten minutes on a GPU.

First `gpu_facts` measures what documentation says of GPUs; each result is a line of a table, for docs/limits.md. Then
the tests run that are marked `gpus`, with NCCL, as `tests.support.device` says, as many as the time allows; each result
is a line of the same table. Options are pytest's; with ``--setup-plan`` or ``--collect-only`` nothing is measured.
"""

import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import Compute
from holdfast.errors import HoldfastError
from holdfast.machine.gpus.report import read_report
from holdfast.machine.gpus.visible import list_visible
from holdfast.terminal import counted
from tests.support import gpu_facts
from tests.support.device import ON_GPUS, VARIABLE
from tests.support.gpu_facts import FACTS, Fact

ROOT = Path(__file__).parents[2]
# The tests of these files run first, in this order: what fails here, fails everywhere.
FIRST = (
    "holdfast/recipes/test_killed.py",
    "holdfast/rank/test_on_gpus.py",
    "flows/test_killed_anywhere.py",
    "holdfast/machine/test_self_test.py",
    "holdfast/rank/test_several_ranks.py",
    "holdfast/rank/test_sharded_ranks.py",
    "holdfast/extensions/virtual_ranks/test_virtual_ranks.py",
    "holdfast/attempt/test_near.py",
)
WITHIN_VARIABLE, UNTIL_VARIABLE = "HOLDFAST_TEST_WITHIN_S", "HOLDFAST_TEST_UNTIL"
WITHIN_S, FACTS_WITHIN_S = 570, 300  # ten minutes, less the end of the last test
TABLE, TABLE_VARIABLE = ROOT / "build" / "gpus.md", "HOLDFAST_TEST_TABLE"
DRY = ("--setup-plan", "--collect-only", "--co")
# Tests that share a single GPU at a time, and the processor's cores for each. A test's processes mostly start.
MOST_ABREAST, CORES_EACH = 4, 3
# For a build of torch without CUDA, which pip takes for the same version.
CUDA_BUILD, CUDA_INDEX = "cu130", "https://download.pytorch.org/whl/cu130"
MOST_LETTERS = 200


@functools.cache
def count_gpus() -> int:
    """Return the number of GPUs that a run sees here."""
    import torch  # which takes a second: only if GPUs are asked for

    visible = list_visible(read_report())
    return torch.cuda.device_count() if visible is None else len(visible)


def count_needed(item: pytest.Item) -> int:
    """Return how many GPUs a test needs: as its mark says, or as its parameter ``ranks``; 0 without a mark."""
    mark = item.get_closest_marker("gpus")
    if mark is None:
        return 0
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    needed: int = mark.args[0] if mark.args else parameters.get("ranks", 0)
    assert needed, f"{item.nodeid}: the mark gpus needs a number, or the test a parameter ranks"
    return needed


def skip_if_too_few(item: pytest.Item) -> None:
    """Skip a test for which the time is over, or that needs more GPUs than there are. On the CPU skip none."""
    if ON_GPUS and time.time() > float(os.environ.get(UNTIL_VARIABLE, "inf")):
        pytest.skip(f"the time of make test-gpus is over: {WITHIN_VARIABLE} sets another one")
    if ON_GPUS and (needed := count_needed(item)) > count_gpus():
        pytest.skip(f"{item.name} needs {counted(needed, 'GPU')}, and this machine has {count_gpus()}")


def limit_time(item: pytest.Item) -> None:
    """On GPUs, end a test at the time at which no further one begins. Otherwise the last one could take any time."""
    if ON_GPUS and (until := os.environ.get(UNTIL_VARIABLE)):
        item.add_marker(pytest.mark.timeout(max(1.0, float(until) - time.time())))


def note_result(report: pytest.TestReport, path: Path) -> None:
    """Append a test's result to the table of `make test-gpus`, at once, because somebody may take the machine back."""
    if report.skipped or (report.passed and report.when != "call"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
    result = "passed" if report.passed else f"FAILED: {message[:MOST_LETTERS]}"
    file, _, name = report.nodeid.partition("::")
    line = spell_line(f"`{Path(file).name}::{name}`", result, report.duration)
    print(f"\n{line}", end="", flush=True)
    with path.open("a") as table:
        print(line, file=table)


def spell_line(about: str, result: str, seconds: float) -> str:
    """Return a line of the table."""
    return f"| {about.replace('|', '/')} | {result.replace('|', '/')} | {seconds:.0f} |"


def place_on_gpus(path: Path) -> int:
    """Return a test file's place in the order of the tests on GPUs."""
    places = {ROOT / "tests" / name: number for number, name in enumerate(FIRST)}
    return places.get(path, len(places))


def find_problem() -> str:
    """Return why nothing can be trained on a GPU here; empty if something can be."""
    import torch

    if not count_gpus():
        problem = read_report().problem or "nvidia-smi shows none to this process"
        return f"no GPU is visible here ({problem}; torch {torch.__version__} sees none), so no test was run"
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA, so no test was run: install torch's build for CUDA in "
            f"{Path(sys.prefix).name}, such as {sys.executable} -m pip install --constraint constraints.txt "
            f"torch=={torch.__version__.partition('+')[0]}+{CUDA_BUILD} --extra-index-url {CUDA_INDEX}"
        )
    from holdfast.training.devices import choose_cuda  # which takes a second, too

    try:
        choose_cuda(Compute(device="cuda"))
    except HoldfastError as error:
        return f"{error}, so no test was run"
    return ""


def measure_facts(until: float) -> Iterator[str]:
    """Measure each fact in a process of its own, and yield a line of a Markdown table for it.

    Args:
        until: the time, as `time.monotonic`, after which no further measurement begins.
    """
    yield "| measured | result | seconds |"
    yield "|---|---|---|"
    for name, fact in FACTS.items():
        began = time.monotonic()
        result = "not measured: the time is over" if began > until else measure(name, fact)
        yield spell_line(fact.about, result, time.monotonic() - began)


def measure(name: str, fact: Fact) -> str:
    """Return a fact's result, or why there is none."""
    if fact.needs_gpu and not count_gpus():
        return "not measured: it needs a GPU"
    try:
        done = gpu_facts.start(name, within_s=fact.within_s)
    except subprocess.TimeoutExpired:
        return f"FAILED: no result within {fact.within_s} s"
    said = done.stdout if not done.returncode else done.stderr
    last = (said.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return last if not done.returncode else f"FAILED: {last}"


def count_abreast() -> list[str]:
    """Return options of pytest for tests that run at the same time: several if each of them can only have one GPU.

    On several GPUs one test runs after the other, because ranks of two tests would wait for the same GPUs.
    """
    count = min(MOST_ABREAST, (os.cpu_count() or 1) // CORES_EACH)
    if count < 2 or count_gpus() > 1 or importlib.util.find_spec("xdist") is None:
        return []
    # With one test at a time for each worker, the first tests are the first to begin.
    return ["--numprocesses", str(count), "--maxschedchunk", "1"]


def main(*options: str) -> None:
    """Measure, and run the marked tests on this machine's GPUs. Without one, say so and succeed."""
    is_dry = any(each in DRY for each in options)
    if (problem := find_problem()) and not (is_dry and count_gpus()):
        print(problem)
        return
    within_s = float(os.environ.get(WITHIN_VARIABLE, WITHIN_S))
    os.environ |= {VARIABLE: "cuda", UNTIL_VARIABLE: str(time.time() + within_s)}
    if not is_dry:
        TABLE.parent.mkdir(exist_ok=True)
        with TABLE.open("w") as table:
            for line in measure_facts(time.monotonic() + min(FACTS_WITHIN_S, within_s)):
                print(line, flush=True)
                print(line, file=table, flush=True)
        os.environ[TABLE_VARIABLE] = str(TABLE)
        print(f"\nthe table is in {TABLE.relative_to(ROOT)}, for docs/limits.md\n", flush=True)
        options = ("--quiet", "-rfE", "--tb=short", *count_abreast(), *options)
    # A file that lacks a library of its own stops no others, and a warning of a different version is no failure.
    lenient = ["--continue-on-collection-errors", "-W", "default"]
    command = [sys.executable, "-m", "pytest", "-m", "gpus", *lenient, *options]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
