"""What others' saves and restores cost, beside holdfast's: the same steps and the same state, in the same run."""

import sys
from pathlib import Path
from typing import Any

from holdfast.checkpoint import count_cores
from holdfast.config import Determinism
from holdfast.machine import determinism
from tests.bench.bare import KEEP_MEMORY
from tests.bench.frame import ROOT, Benchmark, Row, ask, compare, scratch

PYTHON = ROOT / ".venv" / "peers" / "bin" / "python"
PEERS = ("DCP save", "DCP async_save", "accelerate save_state", "Lightning", "HF Trainer")
FIGURES = {
    "stall": "pause of training for a save",
    "durable": "time until a save is fsynced",
    "restore": "time of a cold restore",
    "overhead": "slowdown of the whole run by a save every 9 steps",
}


def run(full: bool) -> list[Row]:
    """The rows of all figures; the peers are left out where their environment isn't there."""
    rows: list[Row] = []
    for size in ("100 MB", *(["1 GB"] if full else [])):
        ours = _measure(sys.executable, "holdfast", size)
        peers = [_measure(PYTHON, name, size) for name in PEERS] if PYTHON.exists() else []
        if not peers:
            print("no peers: make bench installs them in .venv/peers, if pip can")
        rows += [_row(size, figure, ours, peer) for figure in FIGURES for peer in peers or [None]]
    return rows


def _measure(python: str | Path, name: str, size: str) -> dict[str, Any]:
    threads = Determinism(threads=count_cores())
    with scratch() as folder:
        environment = determinism.preamble(threads) | KEEP_MEMORY | {"HF_HUB_OFFLINE": "1", "HOME": folder}
        found = ask("tests.bench.stacks", name, size, f"{folder}/saves", python=python, **environment)
    return {"name": name, **found}


def _row(size: str, figure: str, ours: dict[str, Any], peer: dict[str, Any] | None) -> Row:
    unit, factor = ("%", 100) if figure == "overhead" else ("s", 1)
    of, limit = (f"{peer['name']}, {peer['version']}", peer[figure] * factor) if peer else ("", None)
    return compare(size, FIGURES[figure], ours[figure] * factor, of, limit, unit=unit)


BENCHMARK = Benchmark(
    name="peers",
    about=(
        "The same steps, the same state. holdfast hashes, and fsyncs, and verifies what it restores; DCP fsyncs; the "
        "others do neither, so that the benchmark fsyncs what they wrote, for the durable time only. Lightning's and "
        "the HF Trainer's restore is what beginning with a checkpoint takes longer than beginning without. The whole "
        "run: 32 steps with 3 saves, as each does it by itself, over the bare loop's steps without one."
    ),
    run=run,
)
