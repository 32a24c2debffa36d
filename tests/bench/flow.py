"""What Prefect, chunks and checkpoints cost a run: steps a second through flows and tasks, beside the bare loop.

The run is ``python -m flows.train``, with Prefect's temporary server, as ``make train`` starts it. When each step was
done is noted by its recipe. Counted is from the middle of the second chunk to the middle of the last: the start, the
first save (which takes its memory) and the end are no steady state.
"""

import contextlib
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

CHUNK_S, SMALL_CHUNK_S, SHORT_CHUNK_S = 30.0, 10.0, 3.0
CHUNKS, SHORT_CHUNKS = 4, 12
CALIBRATIONS = 6
REACH, REACH_BOUNDARY_S = 0.985, 0.1


def run(full: bool) -> list[Row]:
    """Runs of long chunks, each between two blocks of the bare loop, in turn with runs of short ones."""
    rounds = 3 if full else 1
    large = _measure("100 MB", CHUNK_S, rounds, with_bare=True)
    return [*large, *_measure("small", SMALL_CHUNK_S, rounds, with_bare=False)]


def _measure(size: str, chunk_s: float, rounds: int, *, with_bare: bool) -> list[Row]:
    samples: dict[str, list[float]] = {}
    with bare_loop(size) as bare:
        step_s = min(bare(max(2, round(0.5 / bare(3)))) for _ in range(CALIBRATIONS))
        long, short = round(chunk_s / step_s), round(SHORT_CHUNK_S / step_s)
        for _ in range(rounds):
            blocks = [bare(long)] if with_bare else []
            few = _mean_step(train(size, long, CHUNKS), long)
            blocks += [bare(long)] if with_bare else []
            done = train(size, short, SHORT_CHUNKS)
            found = {
                "steps/s": 1 / few, "lost": (_mean_step(done, short) - few) * short,
                "near": statistics.median(_lost_at(done, short)),
            } | ({"bare steps/s": 1 / statistics.mean(blocks)} if with_bare else {})  # fmt: skip
            for name, value in found.items():
                samples.setdefault(name, []).append(value)
    median = median_of(samples)
    rows = [
        compare(size, "lost by a boundary, warm", median["lost"], "100 ms", REACH_BOUNDARY_S, 1.0),
        compare(size, "of it, in the first half of the chunk", median["near"]),
    ]
    if not with_bare:
        return rows
    about, bare_speed = f"{chunk_s:.0f} s chunks, flow and tasks", median["bare steps/s"]
    speed = compare(size, about, median["steps/s"], "bare loop", bare_speed, REACH, unit="steps/s", least=True)
    return [speed, *rows]


def _mean_step(done: list[float], chunk: int) -> float:
    """Seconds of a step, from the middle of the second chunk to that of the last."""
    first, last = chunk * 3 // 2 - 1, len(done) - 1 - chunk // 2
    return (done[last] - done[first]) / (last - first)


def _lost_at(done: list[float], chunk: int) -> Iterator[float]:
    """What the first half of each chunk took longer than the halves before and after it."""
    half = chunk // 2
    for start in range(2 * chunk - 1, len(done) - 1 - chunk, chunk):
        before = (done[start] - done[start - half]) / half
        after = (done[start + 2 * half] - done[start + half]) / half
        yield done[start + half] - done[start] - half * (before + after) / 2


def train(size: str, chunk: int, chunks: int) -> list[float]:
    """When each step of a run of so many chunks was done."""
    with scratch() as folder:
        config = write_config(Path(folder), size, chunk, chunks)
        with command("flows.train", config) as process:
            if process.wait():
                raise RuntimeError((Path(folder) / "output").read_text()[-2000:])
        return read_steps(Path(folder) / "steps")


def write_config(folder: Path, size: str, chunk: int, chunks: int) -> Path:
    """The configuration of a run that has everything it writes in the folder."""
    assert size in SIZES
    path = folder / "bench.toml"
    path.write_text(
        f'recipe = "tests.bench.recipe:stack"\nrun = "bench"\nstore = "{folder}/runs"\n'
        f'[chunk]\nsteps = {chunk}\n[determinism]\nthreads = {count_cores()}\n[log]\nfolder = "{folder}/logs"\n'
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
        "plain torch with the same threads and deterministic algorithms. lost by a boundary: by what a run of "
        f"{SHORT_CHUNK_S:.0f} s chunks takes longer a chunk than one of {CHUNK_S:.0f} s chunks (small: of "
        f"{SMALL_CHUNK_S:.0f} s). Prefect's server, and the process that commands the ranks, run on the same cores."
    ),
    run=run,
)
