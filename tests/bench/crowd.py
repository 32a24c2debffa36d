"""What looking at a store costs, as it gets more runs: requests and time of a list, an index and a watch."""

import contextlib
import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.extensions.report.index import make_index, read_rows
from holdfast.extensions.watch.reading import StoreReader
from holdfast.journal.reading import read_all
from holdfast.journal.runs import MOST_SHOWN, choose_runs, list_runs
from holdfast.ledger.standing import read_standing
from holdfast.store import Store, open_store
from tests.bench.counting import Tally, counted
from tests.bench.frame import Benchmark, Row
from tests.bench.journal import environment
from tests.support import servers
from tests.support.makers import make_line, train

RUNS = (100, 1_000, 10_000)
AT_ONCE = 16
# A watch looks for new runs with every fifth poll.
POLLS = 5


def run(full: bool) -> list[Row]:
    """The rows of both stores."""
    sizes = RUNS if full else RUNS[:2]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure("folder", open_store(folder), RUNS)
    with environment(servers.s3_server()):
        return rows + measure("S3", open_store(servers.make_s3_bucket()), sizes)


def measure(name: str, store: Store, sizes: tuple[int, ...]) -> list[Row]:
    """The rows of one store, which gets more and more runs."""
    model = read_model()
    rows: list[Row] = []
    made = 0
    for size in sizes:
        add_runs(store, model, made, size)
        made = size
        rows += _measure(name, store, size)
    rows.sort(key=lambda row: str(row["operation"]))
    return rows


def read_model() -> dict[str, bytes]:
    """Return the files of a run with two commits, by name, without its payloads."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        line = make_line(store, "model")
        for _ in range(2):
            train(line)
        run = store.inside("model")
        names = [name for name in run.list() if name.endswith(".json")]
        for part in ("attempts", "commits", "configs", "metrics", *(each for each in run.list() if "epoch" in each)):
            names += [f"{part}/{name}" for name in run.list(part) if not name.endswith(".safetensors")]
        return {name: run.read(name) for name in names}


def add_runs(store: Store, model: dict[str, bytes], first: int, stop: int) -> None:
    """Write copies of a run under other names, several at once."""

    def write(number: int) -> None:
        run = store.inside(f"run-{number:05d}")
        for name, data in model.items():
            run.replace(name, data)

    with ThreadPoolExecutor(AT_ONCE) as writers:
        list(writers.map(write, range(first, stop)))


def _measure(name: str, plain: Store, runs: int) -> list[Row]:
    tally = Tally()
    store = counted(plain, tally)
    reader = StoreReader(store, MOST_SHOWN)

    def show() -> None:
        read_all(read_standing, choose_runs(store, MOST_SHOWN).journals)

    def draw() -> None:
        chosen = choose_runs(store, MOST_SHOWN)
        make_index(store, read_rows(chosen), note=chosen.note)

    def poll() -> None:
        for _ in range(POLLS):
            reader.poll()

    operations: dict[str, Callable[[], object]] = {
        "show --store": show, "report STORE": draw, "watch STORE, its start": reader.begin,
        f"watch STORE, {POLLS} polls": poll, "audit, prune: find the runs": lambda: list_runs(store),
    }  # fmt: skip
    rows: list[Row] = []
    for operation, call in operations.items():
        with tally.measuring(), contextlib.redirect_stdout(io.StringIO()):
            call()
        rows.append({
            "store": name, "operation": operation, "runs": runs, "requests": tally.requests,
            "HTTP": tally.http if name != "folder" else None, "ms": round(tally.ms),
        })  # fmt: skip
    return rows


BENCHMARK = Benchmark(
    name="crowd",
    about=(
        f"A store with many runs: a list, an index and a watch have the {MOST_SHOWN} newest. S3 is moto on this "
        "machine, whose one process takes milliseconds for a request; a bucket answers many at once."
    ),
    run=run,
    across="runs",
)
