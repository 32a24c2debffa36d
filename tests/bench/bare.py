"""``python -m tests.bench.bare SIZE MODE THREADS``: steps with nothing around them, so many as each line asks for."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from holdfast.checkpoint import count_cores
from holdfast.config import DEFAULT_SEED, Determinism
from holdfast.machine import determinism
from tests.bench.frame import ROOT, time_of
from tests.bench.workload import Loop

WARM_UP = 5
# For all loops that are held against each other: where freed memory goes back to the system, and is slow to be had,
# a step depends on what else happens to lie on the heap.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


@contextlib.contextmanager
def bare_loop(
    size: str, mode: Literal["strict", "fast"] = "strict", threads: int = 0
) -> Iterator[Callable[[int], float]]:
    """What trains so many steps, and gives the seconds of each of them, while the block lasts."""
    threads = threads or count_cores()
    command = [sys.executable, "-m", "tests.bench.bare", size, mode, str(threads)]
    environment = determinism.preamble(Determinism(mode=mode, threads=threads)) | KEEP_MEMORY
    with subprocess.Popen(
        command, env=os.environ | environment, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout

        def train(steps: int) -> float:
            print(steps, file=process.stdin, flush=True)
            return float(process.stdout.readline()) / steps

        try:
            train(WARM_UP)
            yield train
        finally:
            process.kill()


def main(size: str, mode: Literal["strict", "fast"], threads: int) -> None:
    determinism.apply(Determinism(mode=mode, threads=threads), DEFAULT_SEED)
    loop = Loop(size)
    for line in sys.stdin:
        steps = int(line)
        print(time_of(lambda steps=steps: [loop.step() for _ in range(steps)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "strict" if sys.argv[2] == "strict" else "fast", int(sys.argv[3]))
