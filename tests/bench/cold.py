"""How long a killed run takes to be where it was: from the start of the command to the end of the first new step.

All of it (the attempt, its ranks) is ended by SIGKILL in the second chunk, the checkpoint is taken out of the system's
cache, and the same command is started again. Beside it stands what no program can do without: Python, torch, the model
and its optimizer, the checkpoint's bytes from the disk, one step.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.checkpoint import count_cores
from holdfast.config import Determinism
from holdfast.machine import determinism
from tests.bench.disk import make_cold
from tests.bench.flow import command, write_config
from tests.bench.frame import ROOT, Benchmark, Row, compare, median_of, scratch
from tests.bench.recipe import read_steps

SIZE = "100 MB"
CHUNK, CHUNKS = 10, 1000
ROUNDS, FULL_ROUNDS = 4, 9
WITHIN_S = 120.0
REACH = 1.5
FOUND = ", with Prefect"
# What is measured, and the module that trains.
KINDS = {"": "tests.bench.life", FOUND: "flows.train", ", with Prefect, whose server starts as well": "flows.train"}

# What is printed is when the step was done.
BARE = """
import os, sys, time
from pathlib import Path
from holdfast.machine import determinism
from holdfast.config import DEFAULT_SEED, Determinism
determinism.apply(Determinism(threads=int(sys.argv[2])), DEFAULT_SEED)
from tests.bench.disk import read_raw, take_memory
from tests.bench.workload import Loop
loop = Loop(sys.argv[1])
for path in sorted(Path(sys.argv[3]).glob("*.safetensors")):
    read_raw(path, take_memory(path.stat().st_size))
loop.step()
print(time.time())
sys.stdout.flush()
os._exit(0)
"""


def run(full: bool) -> list[Row]:
    """The bare program, the engine's command and the one through Prefect, in turn."""
    with scratch() as name:
        folder = Path(name)
        config = write_config(folder, SIZE, CHUNK, CHUNKS, count_cores())
        _first_step("flows.train", config, after=CHUNK + 2)  # which makes the database of Prefect's server, too
        seconds: dict[str, list[float]] = {}
        _first_step("flows.train", config, spares_server=True)
        for _ in range(FULL_ROUNDS if full else ROUNDS):
            seconds.setdefault("bare", []).append(_time_bare(_make_cold(folder)))
            for kind, module in KINDS.items():
                _make_cold(folder)
                seconds.setdefault(kind, []).append(_first_step(module, config, spares_server=kind == FOUND))
    median, of = median_of(seconds), "a start with a raw read instead of a restore"
    figure = "time from SIGKILL to the first new step"
    return [compare(SIZE, f"{figure}{kind}", median[kind], of, median["bare"], REACH) for kind in KINDS]


def _make_cold(folder: Path) -> Path:
    """The newest checkpoint, whose files are on the disk only."""
    checkpoints = sorted((folder / "runs" / "bench").glob("epoch-*"), key=lambda path: path.stat().st_mtime)
    make_cold(folder / "runs")
    return checkpoints[-1]


def _first_step(module: str, config: Path, after: int = 1, *, spares_server: bool = False) -> float:
    """Seconds until the command has done so many steps; then it's killed."""
    steps = config.parent / "steps"
    began = time.time()
    with command(module, config, spares_server=spares_server) as process:
        while len(done := [each for each in _read(steps) if each > began]) < after:
            if process.poll() is not None or time.time() - began > WITHIN_S:
                raise RuntimeError((config.parent / "output").read_text()[-2000:])
            time.sleep(0.01)
    return done[after - 1] - began


def _read(steps: Path) -> list[float]:
    return read_steps(steps) if steps.exists() else []


def _time_bare(checkpoint: Path) -> float:
    threads = count_cores()
    arguments = [sys.executable, "-c", BARE, SIZE, str(threads), str(checkpoint)]
    environment = os.environ | determinism.preamble(Determinism(threads=threads))
    began = time.time()
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout) - began


BENCHMARK = Benchmark(
    name="cold",
    about=(
        "SIGKILL of everything, then the same command, until the first step after the restored one is done, through "
        "the engine alone; over one process that imports torch, builds the model, reads the checkpoint's bytes from "
        "the disk and does a step, which imports what every optimizer's step does. Then the same through flow and "
        "tasks, with the temporary Prefect server of the killed command, and with one that is started as well."
    ),
    run=run,
)
