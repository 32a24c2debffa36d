"""How long training waits for a rehearsal, and how much of a run that is.

A run of a few chunks is rehearsed at each of them: once beside the ranks that wait, and once in new ranks alone. Each
figure is what the goodput ledger has. The shares of longer runs follow from it, by the rule of `proof.share`. A run is
also stopped by SIGTERM, with the steps that its ranks train after their save and without them.
"""

import functools
import statistics
import time
from pathlib import Path

from holdfast.attempt.due import SHORT_S
from holdfast.checkpoint import count_cores
from holdfast.config import ProofSettings
from holdfast.journal import Journal
from holdfast.ledger.goodput import make_ledger
from holdfast.store import open_store
from tests.bench.flow import command, write_config
from tests.bench.frame import Benchmark, Row, compare, scratch

SIZES = ("100 MB",)
FULL_SIZES = (*SIZES, "1,000 tensors", "1 GB")
CHUNK, CHUNKS, FULL_CHUNKS = 8, 4, 12
LENGTHS = (1_000, 100_000)
WITHIN_S = 1800.0
# How often a run is stopped, and the length of its chunks, which leaves enough steps after the stop.
STOPS, STOPPED_CHUNK = 3, 64


def run(full: bool) -> list[Row]:
    """Rows of each size."""
    return [row for size in (FULL_SIZES if full else SIZES) for row in _measure(size, FULL_CHUNKS if full else CHUNKS)]


def _measure(size: str, chunks: int) -> list[Row]:
    beside_s, restart_s, step_s = _train(size, chunks, is_beside=True)
    alone_s, *_ = _train(size, chunks, is_beside=False)
    committed_s, ended_s = _stop(size, 'rehearse = "on"')
    plain_s, _ = _stop(size, 'rehearse = "off"')
    share = ProofSettings().share
    row = functools.partial(compare, size)
    return [
        row("a rehearsal, beside the ranks", beside_s, "a restart", restart_s),
        row("a rehearsal, in new ranks alone", alone_s, "a restart", restart_s),
        row("from SIGTERM to the commit, with a shadow", committed_s, "without a shadow", plain_s, reach=1.1),
        row("from SIGTERM to the end, with a shadow", ended_s, "without a shadow", plain_s),
        *(
            row(
                f"rehearsals of {steps:,} steps",
                _share(steps * step_s, beside_s, share),
                "proof.share",
                share,
                unit="share",
            )
            for steps in LENGTHS
        ),
    ]


def _train(size: str, chunks: int, *, is_beside: bool) -> tuple[float, float, float]:
    """Return the seconds that training waits for a rehearsal, that ranks need to begin, and of a step."""
    with scratch() as name:
        folder = Path(name)
        proof = f'rehearse = "on"\nshare = 1\nbeside = {str(is_beside).lower()}'
        config = write_config(folder, size, CHUNK, chunks, count_cores(), proof)
        with command("tests.bench.life", config) as process:
            if process.wait(WITHIN_S):
                raise RuntimeError((folder / "output").read_text()[-2000:])
        journal = Journal(open_store(f"{folder}/runs"), "bench")
        ledger = make_ledger(journal)
        commits = [journal.read_commit(number) for number in journal.numbers("commits")]
    rehearsed = sum(commit.rehearse_s > 0 for commit in commits)
    step_s = statistics.median(commit.train_s / CHUNK for commit in commits)
    return ledger.buckets["rehearsal"] / rehearsed, commits[0].restart_s, step_s


def _stop(size: str, proof: str) -> tuple[float, float]:
    """Return the seconds from SIGTERM, inside a run's second chunk, to the commit and to the end of the command.

    Both are medians.
    """
    found: list[tuple[float, float]] = []
    for _ in range(STOPS):
        with scratch() as name:
            folder = Path(name)
            config = write_config(folder, size, STOPPED_CHUNK, 2, count_cores(), proof)
            commits = folder / "runs" / "bench" / "commits"
            with command("tests.bench.life", config) as process:
                _await_file(commits / "00000001.json")
                process.terminate()
                began = time.monotonic()
                _await_file(commits / "00000002.json")
                committed_s = time.monotonic() - began
                process.wait(WITHIN_S)
                found.append((committed_s, time.monotonic() - began))
    committed, ended = zip(*found, strict=True)
    return statistics.median(committed), statistics.median(ended)


def _await_file(path: Path) -> None:
    until = time.monotonic() + WITHIN_S
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"{path} didn't appear")
        time.sleep(0.005)


def _share(train_s: float, rehearsal_s: float, share: float) -> float:
    """Return the share of a run's time that its rehearsals take: the first, and as many as its time pays for."""
    count = int(train_s * share / rehearsal_s) + 1 if train_s > SHORT_S else 0
    return count * rehearsal_s / (train_s + count * rehearsal_s)


BENCHMARK = Benchmark(
    name="rehearsal",
    about=(
        "Seconds that training waits for a rehearsal, over those that new ranks need until they train; the share of a "
        "run's time, from that and the time of a step, for the default of proof.share: the first rehearsal is always "
        "made, and a run of less than a minute has none."
    ),
    run=run,
)
