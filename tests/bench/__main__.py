"""``python -m tests.bench [NAME ...] [--full]``: prints a table a benchmark, and writes bench.json.

Nothing here is a test: a ratio stands beside what it is to reach, and nothing fails where it does not.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from holdfast.machine.gpus.report import read_report
from holdfast.machine.gpus.visible import list_visible
from tests.bench import (
    agreement,
    cold,
    crowd,
    fleet,
    flow,
    foreign,
    growth,
    journal,
    loop,
    lost,
    near,
    peers,
    rehearsal,
    saving,
    shards,
    strict,
    trust,
    virtual,
)
from tests.bench.frame import describe_machine, make_table

BENCHMARKS = [
    each.BENCHMARK
    for each in (
        saving,
        shards,
        lost,
        flow,
        cold,
        near,
        rehearsal,
        strict,
        trust,
        loop,
        foreign,
        agreement,
        virtual,
        peers,
        journal,
        growth,
    )
]
# Those that only run if they are named.
LONG = [fleet.BENCHMARK, crowd.BENCHMARK]
# The order on a machine with a GPU, which is often lent by the minute: first what depends on the machine most.
ON_A_GPU = [each.BENCHMARK for each in (saving, cold, lost, near, rehearsal, strict, loop, peers)]
ON_A_GPU_S = 600.0
WIDTH = 200


def choose(names: list[str], within_s: float | None, has_gpu: bool) -> tuple[list[str], float]:
    """Return the benchmarks to run, in order, and the seconds after which the running one is ended."""
    usual = [benchmark.name for benchmark in (ON_A_GPU if has_gpu else BENCHMARKS)]
    usual += [benchmark.name for benchmark in BENCHMARKS if benchmark.name not in usual]
    limit_s = ON_A_GPU_S if has_gpu and not names else math.inf
    return names or usual, limit_s if within_s is None else within_s


@contextlib.contextmanager
def ending(at: float) -> Iterator[None]:
    """Raise TimeoutError in the block at a time, as `time.monotonic`, unless it has ended before."""

    def end(number: int, frame: object) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, end)
    left_s = at - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    signal.setitimer(signal.ITIMER_REAL, 0 if left_s == math.inf else left_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(arguments: list[str]) -> None:
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS + LONG}
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="What it costs; see bench.json.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(known)}; without a name, all but {', '.join(each.name for each in LONG)}",
    )
    parser.add_argument("--full", action="store_true", help="the largest sizes everywhere, which takes minutes")
    parser.add_argument("--output", type=Path, default=Path("bench.json"), help="what isn't measured stays in it")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help=f"end after so long; with a GPU and without a name, {ON_A_GPU_S:.0f} by default",
    )
    parser.add_argument("--attempts", metavar="N,...", default="", help="fleet: how many attempts, such as 50,200")
    options = parser.parse_args(arguments)
    if options.attempts and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.attempts):
        parser.error(f"--attempts takes numbers such as 50,200, not {options.attempts!r}")
    os.environ[fleet.ATTEMPTS_VARIABLE] = options.attempts
    if unknown := set(options.names) - known.keys():
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders and processes go
    logging.getLogger("holdfast").setLevel(logging.ERROR)  # what is planted is warned of
    console = Console()
    console.width = max(console.width, WIDTH)
    machine = describe_machine()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
    figures = json.loads(options.output.read_text())["benchmarks"] if options.output.exists() else {}
    names, within_s = choose(options.names, options.within, bool(list_visible(read_report())))
    # A run would choose the GPU, and what it is compared with trains on the CPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    until = time.monotonic() + within_s
    for number, name in enumerate(names, 1):
        began = time.monotonic()
        console.print(f"{name} ({number} of {len(names)}) ...", highlight=False)
        try:
            with ending(until):
                rows = known[name].run(options.full)
        except TimeoutError:
            left_out = ", ".join(names[number - 1 :])
            console.print(f"{within_s:.0f} s are over: left out {left_out}; --within sets another time")
            break
        console.print(make_table(known[name], rows))
        console.print(f"  {name}: {time.monotonic() - began:.0f} s\n", highlight=False)
        figures[name] = {"about": known[name].about, "rows": rows}
        options.output.write_text(json.dumps({"machine": machine, "benchmarks": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
