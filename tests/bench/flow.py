"""What Prefect, chunks and checkpoints cost a run: steps a second through flows and tasks, beside the bare loop.

The run is ``python -m flows.train``, with Prefect's temporary server, as ``make train`` starts it. When each step was
done is noted by its recipe. Counted is from the middle of the second chunk to the middle of the last: the start, the
first save (which takes its memory) and the end are no steady state.

A virtual machine's speed changes by a tenth within a minute, which is more than the run costs. So the run and the bare
loop take turns of a few seconds; all processes of the run are stopped while the bare loop trains.
"""

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
TURN_S = 3.0
REACH, REACH_BOUNDARY_S = 0.985, 0.1


def run(full: bool) -> list[Row]:
    """Runs of long chunks, beside the bare loop, in turn with runs of short ones."""
    cores, rounds = count_cores(), 3 if full else 1
    return [row for threads in dict.fromkeys((cores, max(1, cores - 1))) for row in _measure(threads, rounds)]


def _measure(threads: int, rounds: int) -> list[Row]:
    samples: dict[str, list[float]] = {}
    with bare_loop(SIZE, threads=threads) as bare:
        step_s = min(bare(max(2, round(0.5 / bare(3)))) for _ in range(CALIBRATIONS))
        long, short = round(CHUNK_S / step_s), round(SHORT_CHUNK_S / step_s)
        for _ in range(rounds):
            turns = _take_turns(long, threads, lambda: bare(max(1, round(TURN_S / step_s))))
            done, stalls = train(short, SHORT_CHUNKS, threads)
            for name, value in (turns | {"lost": _lost(done, short), "stall": statistics.median(stalls[1:])}).items():
                samples.setdefault(name, []).append(value)
    median = median_of(samples)
    free = count_cores() - threads
    state, about = f"{SIZE}, {free or 'no'} core free", f"speed of a run with Prefect, chunks of {CHUNK_S:.0f} s"
    speed, bare_speed = median["steps/s"], median["bare steps/s"]
    return [
        compare(state, about, speed, "the bare loop", bare_speed, REACH, unit="steps/s", least=True),
        compare(state, "processor time of flow and server", 100 * median["others"], unit="% of a core"),
        compare(state, "time lost at a chunk's boundary", median["lost"], "100 ms", REACH_BOUNDARY_S, 1.0),
        compare(state, "pause of training at a chunk's boundary", median["stall"], "100 ms", REACH_BOUNDARY_S, 1.0),
    ]


def _take_turns(chunk: int, threads: int, train_bare: Callable[[], float]) -> dict[str, float]:
    """Train a run beside the bare loop: steps a second of both, and the cores that the run's other processes use.

    Args:
        train_bare: trains for a turn, and returns the seconds of a step.
    """
    trained, ran_s, others_s, bare_s = 0, 0.0, 0.0, list[float]()
    with scratch() as name:
        folder = Path(name)
        with command("flows.train", write_config(folder, SIZE, chunk, CHUNKS, threads)) as process:
            while _count_steps(folder) < chunk * 3 // 2:
                _check_runs(process, folder)
                time.sleep(0.1)
            found = list_tree(process)
            others = [each for each in found if "holdfast.rank" not in each.cmdline()]
            while (before := _count_steps(folder)) < chunk * CHUNKS - chunk // 2:
                began, used_s = time.monotonic(), _cpu_s(others)
                time.sleep(TURN_S)
                _check_runs(process, folder)
                with _stopped(found):
                    ran_s += time.monotonic() - began
                    trained += _count_steps(folder) - before
                    others_s += _cpu_s(others) - used_s
                    bare_s.append(train_bare())
    return {"steps/s": trained / ran_s, "bare steps/s": 1 / statistics.mean(bare_s), "others": others_s / ran_s}


@contextlib.contextmanager
def _stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for each in processes:
        each.suspend()
    try:
        yield
    finally:
        for each in processes:
            each.resume()


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(each.cpu_times().user + each.cpu_times().system for each in processes)


def _count_steps(folder: Path) -> int:
    steps = folder / "steps"
    return steps.read_bytes().count(b"\n") if steps.exists() else 0


def _check_runs(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Raise RuntimeError, with the end of the output, if the process has ended."""
    if process.poll() is not None:
        raise RuntimeError((folder / "output").read_text()[-2000:])


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


def write_config(
    folder: Path, size: str, chunk: int, chunks: int, threads: int, proof: str = 'rehearse = "off"'
) -> Path:
    """The configuration of a run that has everything it writes in the folder.

    Args:
        proof: the section of that name. Rehearsals have a benchmark of their own.
    """
    assert size in SIZES
    path = folder / "bench.toml"
    path.write_text(
        f'recipe = "tests.bench.recipe:stack"\nrun = "bench"\nstore = "{folder}/runs"\n'
        f'[chunk]\nsteps = {chunk}\n[determinism]\nthreads = {threads}\n[log]\nfolder = "{folder}/logs"\n'
        f'[settings]\nsize = "{size}"\nsteps = {chunk * chunks}\n[proof]\n{proof}\n'
    )
    return path


@contextlib.contextmanager
def command(module: str, config: Path, *, spares_server: bool = False) -> "Iterator[subprocess.Popen[bytes]]":
    """A module that trains, as a process with a home of its own; nothing of it is left after the block.

    Args:
        spares_server: whether Prefect's server lives on for the next command.
    """
    folder = config.parent
    environment = {
        "HOME": str(folder), "PREFECT_HOME": str(folder / "prefect"), STEPS_VARIABLE: str(folder / "steps"),
        "DO_NOT_TRACK": "1", "HOLDFAST_SERVER_LINGERS_S": "120" if spares_server else "0", **KEEP_MEMORY,
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
        kill_all(process, spares_server=spares_server)


def list_tree(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return a process after all that it has started."""
    root = psutil.Process(process.pid)
    return [*root.children(recursive=True), root]


def kill_all(process: "subprocess.Popen[bytes]", *, spares_server: bool = False) -> None:
    """Kill the process, and all that it has started: its ranks and, unless it is spared, its server."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = list_tree(process)
        if spares_server:
            found = [each for each in found if "tasks.server" not in each.cmdline()]
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
