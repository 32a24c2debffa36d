"""What Prefect, chunks and checkpoints cost a run: steps a second through flows and tasks, beside the bare loop.

The run is ``python -m flows.train``, with Prefect's temporary server, as ``make train`` starts it. When each step was
done is noted by its recipe. Counted is from the middle of the second chunk to the middle of the last: the start, the
first save (which takes its memory) and the end are no steady state.
"""

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from holdfast.checkpoint import count_cores
from tests.bench.bare import KEEP_MEMORY, bare_loop
from tests.bench.frame import ROOT, Benchmark, Row, compare, median_of, scratch
from tests.bench.recipe import STEPS_VARIABLE, read_steps
from tests.bench.workload import SIZES

SIZE = "100 MB"
CHUNK_S, SHORT_CHUNK_S = 30.0, 6.0
CHUNKS, SHORT_CHUNKS = 4, 16
CALIBRATIONS = 6
REACH, REACH_BOUNDARY_S = 0.985, 0.1


def run(full: bool) -> list[Row]:
    """Runs of long chunks, each between two blocks of the bare loop, in turn with runs of short ones."""
    cores, rounds = count_cores(), 3 if full else 1
    return [row for threads in dict.fromkeys((cores, max(1, cores - 1))) for row in _measure(threads, rounds)]


def _measure(threads: int, rounds: int) -> list[Row]:
    samples: dict[str, list[float]] = {}
    with bare_loop(SIZE, threads=threads) as bare:
        step_s = min(bare(max(2, round(0.5 / bare(3)))) for _ in range(CALIBRATIONS))
        long, short = round(CHUNK_S / step_s), round(SHORT_CHUNK_S / step_s)
        for _ in range(rounds):
            before = bare(long)
            step = _mean_step(train(long, CHUNKS, threads)[0], long)
            after = bare(long)
            done, stalls = train(short, SHORT_CHUNKS, threads)
            for name, value in {
                "steps/s": 1 / step, "bare steps/s": 2 / (before + after),
                "lost": _lost(done, short), "stall": statistics.median(stalls[1:]),
            }.items():  # fmt: skip
                samples.setdefault(name, []).append(value)
    median = median_of(samples)
    free = count_cores() - threads
    state, about = f"{SIZE}, {free or 'no'} core free", f"{CHUNK_S:.0f} s chunks, flow and tasks"
    speed, bare_speed = median["steps/s"], median["bare steps/s"]
    return [
        compare(state, about, speed, "bare loop", bare_speed, REACH, unit="steps/s", least=True),
        compare(state, "lost by a boundary, warm", median["lost"], "100 ms", REACH_BOUNDARY_S, 1.0),
        compare(state, "of it, standing still", median["stall"], "100 ms", REACH_BOUNDARY_S, 1.0),
    ]


def _mean_step(done: list[float], chunk: int) -> float:
    """Seconds of a step, from the middle of the second chunk to that of the last."""
    first, last = chunk * 3 // 2 - 1, len(done) - 1 - chunk // 2
    return (done[last] - done[first]) / (last - first)


def _lost(done: list[float], chunk: int) -> float:
    """Seconds by which the steps of a chunk are longer than most of them are, from the third chunk on.

    Of each step it takes the median over all chunks, so that only what belongs to the boundary is in the sum.
    """
    steps = [after - before for before, after in itertools.pairwise(done)][2 * chunk - 1 :]
    typical = [statistics.median(steps[place::chunk]) for place in range(chunk)]
    return sum(typical) - chunk * statistics.median(typical)


def train(chunk: int, chunks: int, threads: int) -> tuple[list[float], list[float]]:
    """When each step of a run of so many chunks was done, and how long it stood still for each save."""
    with scratch() as name:
        folder = Path(name)
        config = write_config(folder, SIZE, chunk, chunks, threads)
        with command("flows.train", config) as process:
            if process.wait():
                raise RuntimeError((folder / "output").read_text()[-2000:])
        commits = sorted((folder / "runs" / "bench" / "commits").iterdir())
        return read_steps(folder / "steps"), [json.loads(commit.read_text())["stall_s"] for commit in commits]


def write_config(folder: Path, size: str, chunk: int, chunks: int, threads: int) -> Path:
    """The configuration of a run that has everything it writes in the folder."""
    assert size in SIZES
    path = folder / "bench.toml"
    path.write_text(
        f'recipe = "tests.bench.recipe:stack"\nrun = "bench"\nstore = "{folder}/runs"\n'
        f'[chunk]\nsteps = {chunk}\n[determinism]\nthreads = {threads}\n[log]\nfolder = "{folder}/logs"\n'
        f'[settings]\nsize = "{size}"\nsteps = {chunk * chunks}\n'
    )
    return path


@contextlib.contextmanager
def command(module: str, config: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A module that trains, as a process with a home of its own; nothing of it is left after the block."""
    folder = config.parent
    environment = {
        "HOME": str(folder), "PREFECT_HOME": str(folder / "prefect"), STEPS_VARIABLE: str(folder / "steps"),
        "DO_NOT_TRACK": "1", **KEEP_MEMORY,
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(config)],
            cwd=ROOT, env=inherited | environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        kill_all(process)


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """The process is gone, with all that it has started: its ranks, its server."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(found)
    process.wait()


BENCHMARK = Benchmark(
    name="flow",
    about=(
        "Steps a second through flow and chunk tasks, saves and commits among them, over those of the same loop in "
        "plain torch with the same threads and deterministic algorithms. lost by a boundary: by what the "
        f"steps of a {SHORT_CHUNK_S:.0f} s chunk, each the median of many chunks, are longer than most of them are. "
        "Prefect's server, and the process that commands the ranks, run on the same cores."
    ),
    run=run,
)
