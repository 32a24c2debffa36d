"""``python -m tests.support.gpus [OPTION ...]``: run the tests that are marked `gpus` on this machine's GPUs.

Options are pytest's. The tests then train on GPUs with NCCL, as `tests.support.device` says.
"""

import functools
import os
import sys

import pytest

from holdfast.machine.gpus import list_visible, read_report
from holdfast.terminal import counted
from tests.support.device import ON_GPUS, VARIABLE


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
    needed: int = mark.args[0] if mark.args else item.callspec.params["ranks"]  # type: ignore[attr-defined]
    return needed


def skip_if_too_few(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are. On the CPU any number of ranks trains."""
    if ON_GPUS and (needed := count_needed(item)) > count_gpus():
        pytest.skip(f"{item.name} needs {counted(needed, 'GPU')}, and this machine has {count_gpus()}")


def main() -> None:
    """Run the marked tests on this machine's GPUs. Without one, say so and succeed: there is nothing to test."""
    if not count_gpus():
        import torch

        problem = read_report().problem or "nvidia-smi shows none to this process"
        print(f"no GPU is visible here ({problem}; torch {torch.__version__} sees none), so no test was run")
        return
    os.environ[VARIABLE] = "cuda"
    # One after the other: ranks of two tests would wait for the same GPUs.
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-m", "gpus", *sys.argv[1:]])


if __name__ == "__main__":
    main()
