"""``python -m tests.bench [NAME ...] [--full]``: prints a table a benchmark, and writes bench.json.

Nothing here is a test: a ratio stands beside what it is to reach, and nothing fails where it does not.
"""

import argparse
import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from tests.bench import (
    agreement,
    cold,
    crowd,
    fleet,
    flow,
    journal,
    loop,
    lost,
    near,
    peers,
    preempt,
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
        agreement,
        virtual,
        peers,
        journal,
    )
]
# Those that only run if they are named.
LONG = [preempt.BENCHMARK, fleet.BENCHMARK, crowd.BENCHMARK]
WIDTH = 200


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
    for number, name in enumerate(names := options.names or [benchmark.name for benchmark in BENCHMARKS], 1):
        began = time.monotonic()
        console.print(f"{name} ({number} of {len(names)}) ...", highlight=False)
        rows = known[name].run(options.full)
        console.print(make_table(known[name], rows))
        console.print(f"  {name}: {time.monotonic() - began:.0f} s\n", highlight=False)
        figures[name] = {"about": known[name].about, "rows": rows}
        options.output.write_text(json.dumps({"machine": machine, "benchmarks": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
