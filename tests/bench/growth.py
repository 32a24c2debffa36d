"""How the costs grow: with the tensors of a state, the commits of a run, and the runs of a store.

``python -m tests.bench.growth TENSORS`` prints the seconds of a save and a restore as JSON.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from holdfast.extensions.report.gathering import Gatherer
from holdfast.extensions.report.page import make_page
from holdfast.extensions.watch.reading import RunReader
from holdfast.journal import Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.ledger.standing import read_standing
from holdfast.store import Store, open_store
from tests.bench import crowd, loop
from tests.bench.counting import Tally, counted
from tests.bench.frame import Benchmark, Row, ask, scratch, time_of
from tests.bench.history import POLICY, RUN, History
from tests.bench.journal import resume
from tests.bench.saving import MB, Bench
from tests.support.makers import STEPS_PER_EPOCH

COMMITS, MORE_COMMITS = (10, 1_000, 10_000), 100_000
TENSORS, MORE_TENSORS = ("10", "400", "4000"), "40000"
# The bytes of a state, however many tensors it has.
STATE_BYTES, ROUNDS = 64 * MB, 5


def run(full: bool) -> list[Row]:
    """Return the rows of each thing that grows. The last size of each is measured only if there is time."""
    commits, tensors = (*COMMITS, MORE_COMMITS), (*TENSORS, MORE_TENSORS)
    rows = measure_tensors(tensors if full else TENSORS)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        for number in commits if full else COMMITS:
            rows += measure_commits(store.inside(f"{number}-commits"), number)
        rows += [
            _row("runs of a store", str(row["operation"]), row["runs"], row["ms"], row["requests"])
            for row in crowd.measure("folder", store.inside("crowd"), crowd.RUNS if full else crowd.RUNS[:2])
        ]
    return sorted(rows, key=lambda row: (str(row["grows"]), str(row["operation"])))


def measure_tensors(sizes: tuple[str, ...]) -> list[Row]:
    """Return the rows of a step, and of a save and a restore, each in a process of its own."""
    rows: list[Row] = []
    for size in sizes:
        step_s = loop.measure(size)["outside"]
        rows.append(_row("tensors of a state", "a step in a loop of your own", int(size), step_s * 1000))
        for operation, seconds in ask("tests.bench.growth", size).items():
            rows.append(_row("tensors of a state", operation, int(size), seconds * 1000))
    return rows


def time_saves(tensors: int) -> dict[str, float]:
    """Return the median seconds of the pause for a save, of a save until it is durable, and of a restore."""
    with scratch() as folder:
        bench = Bench(Path(folder), STATE_BYTES, tensors)
        bench.save()
        bench.prepare()
        samples = [(*bench.save(), time_of(bench.restore)) for _ in range(ROUNDS)]
    medians = map(statistics.median, zip(*samples, strict=True))
    return dict(zip(("pause for a save", "a save, until it is durable", "a restore"), medians, strict=True))


def measure_commits(store: Store, commits: int) -> list[Row]:
    """Return the rows of a run of so many commits, one after each epoch, in a folder."""
    tally = Tally()
    history = History(store, commits)
    journal = Journal(counted(store, tally), RUN)

    operations: dict[str, Callable[[], object]] = {
        "find what a resume continues from": lambda: resume(journal),
        "show": lambda: read_standing(journal),
        "watch, its start": lambda: RunReader(journal).begin(),
        "prune one checkpoint": lambda: prune_by_policy(journal, POLICY, STEPS_PER_EPOCH),
        "report": lambda: make_page(Gatherer(journal).gather()),
        "verify": lambda: verify_run(journal),
    }
    rows: list[Row] = []
    for operation, call in operations.items():
        if operation.startswith("prune"):
            history.train()
        journal = Journal(counted(store, tally), RUN)
        ms: list[float] = []
        for _ in range(1 if operation.startswith("prune") else ROUNDS):
            journal = Journal(counted(store, tally), RUN)
            with tally.measuring():
                call()
            ms.append(tally.ms)
        rows.append(_row("commits of a run", operation, commits, statistics.median(ms), tally.requests))
    return rows


def _row(grows: str, operation: str, size: object, ms: object, requests: object = None) -> Row:
    assert isinstance(size, int)
    assert isinstance(ms, int | float)
    assert isinstance(requests, int | None)
    return {"grows": grows, "operation": operation, "size": size, "requests": requests, "ms": round(ms, 2)}


BENCHMARK = Benchmark(
    name="growth",
    about=(
        "How the costs grow, on a local disk: time and, where the store is asked, requests. A folder lists all its "
        "names at once; benchmark journal counts the requests to a bucket."
    ),
    run=run,
    across="size",
)

if __name__ == "__main__":
    print(json.dumps(time_saves(int(sys.argv[1]))))
