"""What many attempts at once cost one Prefect server: processor time, requests, rows, and runs falsely called vanished.

The server and its Postgres are started as ``make up POSTGRES=1`` starts them, with the same pools, deployments and
automations. `alive` has the attempts.
"""

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tasks.untracked  # noqa: F401

import asyncpg
import psutil
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from deployments.ledger import ProcessLedger, end_processes
from deployments.local import access, own_auth, start_server
from deployments.postgres import choose_postgres_user, start_postgres
from deployments.setup import set_up
from tests.bench.frame import ROOT, Benchmark, Row, scratch

ATTEMPTS_VARIABLE = "BENCH_ATTEMPTS"
USUAL = (50, 200)
LARGEST = 500
IN_A_PROCESS = 25
SETTLE_S, IDLE_S, WINDOW_S, LONG_WINDOW_S = 20.0, 20.0, 60.0, 300.0
# Attempts that don't begin in this time are counted as they are then: a busy server starts a few of them a second.
BEGINS_WITHIN_S = 600.0

KINDS = {
    "PATCH /flow_runs/{id}/labels": "labels",
    "GET /flow_runs/{id}": "reads of states",
    "POST /logs/": "logs",
}
ALIVE = """
    SELECT count(*) FROM flow_run JOIN flow ON flow.id = flow_run.flow_id
    WHERE flow.name = 'attempt' AND flow_run.state_type = 'RUNNING'
"""
VANISHED = "SELECT count(*) FROM flow_run_state WHERE name = 'Vanished'"
EVENTS = "SELECT event, count(*) FROM events GROUP BY event"
SIZE = "SELECT pg_database_size(current_database())"
TABLES = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables"


def run(full: bool) -> list[Row]:
    """The rows of each number of attempts."""
    chosen = os.environ.get(ATTEMPTS_VARIABLE, "")
    numbers = [int(each) for each in chosen.split(",")] if chosen else [*USUAL, *([LARGEST] if full else [])]
    return [row for number in numbers for row in measure(number, LONG_WINDOW_S if full else WINDOW_S)]


def measure(attempts: int, window_s: float) -> list[Row]:
    """The rows of one number of attempts, with a server and a database of their own."""
    with scratch() as name, _server(Path(name)) as (ledger, database):
        ask = Database(database)
        time.sleep(SETTLE_S)
        idle = Window(Figures(ledger, [], ask))
        time.sleep(IDLE_S)
        idle.end(Figures(ledger, [], ask))
        with _alive(attempts, ledger, Path(name)) as clients:
            _await_attempts(ask, attempts)
            time.sleep(SETTLE_S)
            for client in clients:
                client.begin()
            window = Window(Figures(ledger, clients, ask))
            time.sleep(window_s)
            window.end(Figures(ledger, clients, ask))
            requests = [client.end() for client in clients]
            alive = ask.count(ALIVE)
    return _make_rows(attempts, alive, idle, window, requests)


class Database:
    """Questions to the server's database."""

    def __init__(self, url: str) -> None:
        self._url = url.replace("+asyncpg", "")

    def rows(self, question: str) -> list[Any]:
        async def ask() -> list[Any]:
            connection = await asyncpg.connect(self._url)
            try:
                return list(await connection.fetch(question))
            finally:
                await connection.close()

        return asyncio.run(ask())

    def count(self, question: str) -> int:
        return int(self.rows(question)[0][0])


class Figures:
    """The counters at one moment."""

    def __init__(self, ledger: ProcessLedger, clients: "Sequence[Client]", ask: Database) -> None:
        self.server_s = _cpu_s(ledger.known["server"]["pid"])
        self.postgres_s = _cpu_s(ledger.known["postgres"]["pid"])
        self.clients_s = sum(_cpu_s(client.process.pid) for client in clients)
        self.events = {row[0]: int(row[1]) for row in ask.rows(EVENTS)}
        self.tables = {row[0]: int(row[1]) for row in ask.rows(TABLES)}
        self.size, self.vanished = ask.count(SIZE), ask.count(VANISHED)


class Window:
    """The figures at the beginning and at the end of some seconds."""

    def __init__(self, before: Figures) -> None:
        self.before = self.after = before
        self._began, self.took_s = time.monotonic(), 0.0

    def end(self, after: Figures) -> None:
        self.after, self.took_s = after, time.monotonic() - self._began

    def cores(self, name: str) -> float:
        """Return how many cores a figure's processes used."""
        return float(getattr(self.after, name) - getattr(self.before, name)) / self.took_s


def _cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and its descendants, with those that have ended."""
    root = psutil.Process(pid)
    times = []
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times.append(process.cpu_times())
    return sum(each.user + each.system for each in times) + times[0].children_user + times[0].children_system


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[tuple[ProcessLedger, str]]:
    """A server with pools, deployments and automations, and its database's URL; nothing of them is left afterwards."""
    state = folder / "state"
    state.mkdir()
    ledger = ProcessLedger(state)
    cluster = choose_postgres_user(state)[1]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            database = start_postgres(ledger)
            url = start_server(ledger, database)
            with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: own_auth(ledger)}):
                set_up("process")
        yield ledger, database
    finally:
        for name in ("server", "postgres"):
            end_processes(ledger, [name])
        shutil.rmtree(cluster, ignore_errors=True)
        cluster.with_suffix(".password").unlink(missing_ok=True)


class Client:
    """A process with some of the attempts."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def begin(self) -> None:
        self._tell("begin")

    def end(self) -> dict[str, list[float]]:
        self._tell("end")
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def _tell(self, word: str) -> None:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)


@contextlib.contextmanager
def _alive(attempts: int, ledger: ProcessLedger, folder: Path) -> Iterator[list[Client]]:
    """Processes with so many attempts, which are gone after the block."""
    url = str(ledger.known["server"]["url"])
    environment = os.environ | access(ledger, url) | {"PREFECT_HOME": str(folder / "client"), "PYTHONUNBUFFERED": "1"}
    clients: list[Client] = []
    with (folder / "clients.log").open("ab") as log:
        try:
            for first in range(0, attempts, IN_A_PROCESS):
                count = min(IN_A_PROCESS, attempts - first)
                command = [sys.executable, "-m", "tests.bench.alive", str(first), str(count), str(folder / "runs")]
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    encoding="utf-8", start_new_session=True,
                )  # fmt: skip
                clients.append(Client(process))
            yield clients
        finally:
            for client in clients:
                client.process.kill()
                client.process.wait()


def _await_attempts(ask: Database, attempts: int) -> None:
    deadline = time.monotonic() + BEGINS_WITHIN_S
    while ask.count(ALIVE) < attempts and time.monotonic() < deadline:
        time.sleep(2)


def _make_rows(
    attempts: int, alive: int, idle: Window, window: Window, requests: Sequence[dict[str, list[float]]]
) -> list[Row]:
    before, after = window.before, window.after
    hours = attempts * window.took_s / 3600

    def row(figure: str, value: float, unit: str) -> Row:
        return {"attempts": attempts, "figure": figure, "value": float(f"{value:.4g}"), "unit": unit}

    taken: dict[str, list[float]] = defaultdict(list)
    for each in requests:
        for kind, seconds in each.items():
            taken[KINDS.get(kind, kind)] += seconds
    rows = [
        row("alive at the end", alive, "attempts"),
        row("called vanished, falsely", after.vanished - before.vanished, "times"),
        *(
            row(about, 3600 * (window.cores(name) - idle.cores(name)) / attempts, "CPU s an attempt-hour")
            for name, about in (("server_s", "server"), ("postgres_s", "Postgres"))
        ),
        row("server, of a core", 100 * window.cores("server_s"), "%"),
        row("server and Postgres without attempts", 100 * (idle.cores("server_s") + idle.cores("postgres_s")), "%"),
        row("attempts' own processes, of a core", 100 * window.cores("clients_s"), "%"),
        row("database", (after.size - before.size) / hours / 1e6, "MB an attempt-hour"),
    ]
    for name, size in sorted(after.tables.items(), key=lambda each: before.tables.get(each[0], 0) - each[1])[:6]:
        rows.append(row(f"  table {name}", (size - before.tables.get(name, 0)) / hours / 1e6, "MB an attempt-hour"))
    rows.append(row("requests", sum(map(len, taken.values())) / hours, "an attempt-hour"))
    for kind, seconds in sorted(taken.items(), key=lambda each: -len(each[1]))[:12]:
        rows.append(row(f"  {kind}", len(seconds) / hours, "an attempt-hour"))
    labels = taken.get("labels") or [0.0]
    rows.append(row("a label takes, median", 1000 * statistics.median(labels), "ms"))
    rows.append(row("a label takes, 99 of 100", 1000 * sorted(labels)[int(0.99 * (len(labels) - 1))], "ms"))
    grown = {name: number - before.events.get(name, 0) for name, number in after.events.items()}
    rows.append(row("events", sum(grown.values()) / hours, "an attempt-hour"))
    for name, number in sorted(grown.items(), key=lambda each: -each[1])[:6]:
        rows.append(row(f"  {name}", number / hours, "an attempt-hour"))
    return rows


BENCHMARK = Benchmark(
    name="fleet",
    about=(
        "One Prefect server with a Postgres database, and attempts that are alive, each with its train. Trained is "
        "nothing; flows, tasks, heartbeats, watchers, events, logs and artifacts are the real ones, and a commit comes "
        "every minute. Processor time doesn't depend on what else the machine does; the milliseconds do."
    ),
    run=run,
)
