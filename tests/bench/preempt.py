"""A run on a preemption trace: SIGKILL of every process at the recorded times, and the goodput that a replay expects.

The recorded intervals of a dense pool are compressed, so that its hours pass in minutes. At the start of each interval
the command is started, as a machine that comes starts it; at its end all of its processes are killed. The expected
goodput is a replay of the same intervals, as ``holdfast plan --trace`` makes it, with the mean costs that the run's own
commits and attempts have recorded. The chunks have the length that such a plan advises after a short calibration.
"""

import contextlib
import math
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint import count_cores
from holdfast.journal import Commit, Journal
from holdfast.ledger.forecast import replay
from holdfast.ledger.goodput import Spent, make_ledger
from holdfast.ledger.interval import SAVES, Cost, Measured, cost_of
from holdfast.ledger.timeline import Life, make_lives, read_records
from holdfast.ledger.traces import Trace, read_trace
from holdfast.store import open_store
from tests.bench.flow import command, write_config
from tests.bench.frame import Benchmark, Row, compare, scratch

TRACE = "pccheck_gcp-a100-g16"
SIZE = "100 MB"
COMPRESSED, FULL_COMPRESSED = 20.0, 5.0
GAP_S = 1.0
CALIBRATION_STEPS, CALIBRATION_COMMITS = 20, 8
WITHIN_S = 300.0
ENDLESS = 10_000  # chunks
REACH = 0.99


@dataclass(frozen=True)
class Up:
    """One interval in which the machine was up, in seconds since 1970."""

    began: float
    ended: float


def run(full: bool) -> list[Row]:
    """Calibrate, play the trace against a run, and hold its goodput against the expected one."""
    trace = read_trace(TRACE)
    factor = FULL_COMPRESSED if full else COMPRESSED
    with scratch() as name:
        steps = _calibrate(Path(name) / "calibration", trace.mean_s / factor)
        folder = Path(name) / "run"
        ups = _play(folder, trace, factor, steps)
        return _compare(_open(folder), ups, steps, f"{trace.name}, time / {factor:g}")


def _open(folder: Path) -> Journal:
    return Journal(open_store(f"{folder}/runs"), "bench")


def _write(folder: Path, steps: int) -> Path:
    folder.mkdir()
    return write_config(folder, SIZE, steps, ENDLESS, max(1, count_cores() - 1))


def _calibrate(folder: Path, mean_s: float) -> int:
    """Return the best length of a chunk, in steps, if machines are lost every `mean_s` seconds."""
    config = _write(folder, CALIBRATION_STEPS)
    with command("tests.bench.life", config) as process:
        deadline = time.monotonic() + WITHIN_S
        while _open(folder).newest_number() < CALIBRATION_COMMITS:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "output").read_text()[-2000:])
            time.sleep(0.5)
    known = _measure(_open(folder), 0.0)
    return max(1, round(max(math.sqrt(2 * known.cost_s * mean_s), SAVES * known.save_s) / known.step_s))


def _play(folder: Path, trace: Trace, factor: float, steps: int) -> list[Up]:
    """Let the machine come and vanish as the trace says; return when it was up."""
    config, ups = _write(folder, steps), []
    for length_s in trace.lengths_s:
        began = time.time()
        with command("tests.bench.life", config) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(length_s / factor)
                raise RuntimeError((folder / "output").read_text()[-2000:])
            ended = time.time()
        ups.append(Up(began, ended))
        time.sleep(GAP_S)
    return ups


def _measure(journal: Journal, restart_s: float) -> Measured:
    """Return the mean costs over all commits of a run: sums, which the goodput is made of, follow from means."""
    commits = [journal.read_commit(number) for number in journal.numbers("commits")]
    known = {0: 0} | {commit.number: commit.step for commit in commits}
    costs = [cost for each in commits if (cost := _cost_of(each, known))]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(cost, name) for cost in costs)

    return Measured(
        mean("step_s"), mean("stall_s"), mean("save_s"), restart_s, slow_s=mean("slow_s"), count=len(costs)
    )  # fmt: skip


def _cost_of(commit: Commit, known: dict[int, int]) -> Cost | None:
    return None if commit.why == "adopted" else cost_of(commit, commit.step - known[commit.parent])


def _find_restarts(lives: list[Life], ups: list[Up]) -> list[float]:
    """Return the seconds from the start of the command until training began, or until it was killed before."""
    first = [
        next((life.trained[0].began for life in lives if life.trained and _is_in(life, up)), up.ended) for up in ups
    ]
    return [min(began, up.ended) - up.began for began, up in zip(first, ups, strict=True)]


def _is_in(life: Life, up: Up) -> bool:
    return up.began <= life.began <= up.ended


def _compare(journal: Journal, ups: list[Up], steps: int, state: str) -> list[Row]:
    ledger = make_ledger(journal)
    restarts = _find_restarts(make_lives(read_records(journal)), ups)
    trained = [restart_s for restart_s, up in zip(restarts, ups, strict=True) if restart_s < up.ended - up.began]
    measured = _measure(journal, statistics.fmean(trained))
    expected = Spent.sum(replay([up.ended - up.began for up in ups], measured, steps * measured.step_s))
    found = Spent(expected.available_s, ledger.buckets["productive"], sum(restarts))
    of = "holdfast plan"
    return [
        compare(state, "goodput", found.goodput, of, expected.goodput, unit="share"),
        compare(state, "limit of the goodput", found.limit, of, expected.limit, unit="share"),
        compare(
            state,
            "efficiency: goodput / limit",
            found.efficiency,
            of,
            expected.efficiency,
            REACH,
            unit="share",
            least=True,
        ),
        compare(state, "preemptions", len(ups), unit=""),
        compare(state, "time that the machine was up", found.available_s),
        compare(state, "time of a chunk", steps * measured.step_s),
        compare(state, "training lost by a save", measured.cost_s),
        compare(state, "training lost by slower steps after a save", measured.slow_s),
        compare(state, "time until a save is durable", measured.save_s),
        compare(state, "time of a restart, from the command", measured.restart_s),
        compare(state, "sum of the ledger's buckets", sum(ledger.buckets.values()), "the wall time", ledger.wall_s),
    ]


BENCHMARK = Benchmark(
    name="preempt",
    about=(
        "A run that is killed, process by process, at the compressed times of a recorded dense pool, beside a replay "
        "of the same times with the costs that its own records have."
    ),
    run=run,
)
