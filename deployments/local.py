"""A server, work pools and workers on this machine: ``make up`` and ``make down``.

All that runs, and all that it writes, is in one folder outside of the repository (HOLDFAST_STATE, or
~/.local/state/holdfast). What was started is on record there by process id and start time, so that nothing else is
ever ended.
"""

import contextlib
import hashlib
import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tasks.untracked  # noqa: F401

import httpx
from cyclopts import App
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from deployments.automations import make_automations
from holdfast.cli import run_app
from holdfast.errors import ConfigError, RunStopped
from tasks.server import bypass_proxy, free_port, is_healthy

ROOT = Path(__file__).parent.parent
STATE = Path(os.environ.get("HOLDFAST_STATE") or Path.home() / ".local" / "state" / "holdfast")
POOLS = {
    "stable": "What only watches and tidies up: train, prune, sweep, drill.",
    "gpu": "What trains: attempt, evaluate, audit.",
}
USUAL_PORT = 4200
POSTGRES_USER = "postgres"  # Debian's
READY_WITHIN_S = 120.0
DOWN_WITHIN_S = 60.0
# How often a worker asks for work, in seconds.
QUERY_EVERY_S = 1.0


class Ledger:
    """What was started, in ``started.json`` of a folder that has all its output too.

    Attributes:
        known: pid, start time and facts, by name.
        processes: those that this process has started itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "started.json"
        self.known: dict[str, dict[str, Any]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        with contextlib.suppress(OSError, ValueError):
            self.known = json.loads(self._path.read_text("utf-8"))

    def is_alive(self, name: str) -> bool:
        """Whether the process that was started under this name lives."""
        entry = self.known.get(name)
        return entry is not None and entry["began"] != "" and began_at(entry["pid"]) == entry["began"]

    def add(self, name: str, pid: int, **facts: Any) -> None:
        self.known[name] = {"pid": pid, "began": began_at(pid), **facts}
        self._write()

    def remove(self, name: str) -> None:
        self.known.pop(name, None)
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self.known, indent=2) + "\n", "utf-8")


def began_at(pid: int) -> str:
    """When a process began; empty for none, and for one that has ended and waits to be noticed."""
    shown = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        # It is compared with what another shell saw: its words and hours are those of the locale and the time zone.
        env=os.environ | {"LC_ALL": "C", "TZ": "UTC0"},
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    stat, _, began = shown.stdout.strip().partition(" ")
    return "" if stat.startswith("Z") else began.strip()


def start(
    ledger: Ledger,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    user: Mapping[str, Any] | None = None,
    **facts: Any,
) -> None:
    """A process of its own session, which outlives this one; its output is in ``<name>.log``.

    Args:
        user: who it runs as, as `subprocess.Popen` has it.
        facts: what else is to be known of it.
    """
    with (ledger.folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            cwd="/" if user else ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_reset_signals,
            **(user or {}),
        )
    ledger.processes.append(process)
    ledger.add(name, process.pid, **facts)


def _reset_signals() -> None:
    # A shell starts what is in its background with SIGINT ignored, and a worker that ignores it can't be ended.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def end(ledger: Ledger, name: str) -> bool:
    """What was started under this name has ended; whether it was alive.

    The flow runs of a worker are told first, and save: told itself, it would kill them.
    """
    was_alive = ledger.is_alive(name)
    if was_alive:
        pid = ledger.known[name]["pid"]
        if name.startswith("worker-"):
            flow_runs = children_of(pid)
            _signal(flow_runs, signal.SIGTERM)
            _await_gone(lambda: bool(set(children_of(pid)) & set(flow_runs)))
        _signal([pid], signal.SIGTERM)
        if not _await_gone(lambda: ledger.is_alive(name)):
            os.killpg(pid, signal.SIGKILL)
    ledger.remove(name)
    return was_alive


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and that live."""
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, encoding="utf-8", check=True)
    rows = [line.split() for line in shown.stdout.splitlines()]
    return [int(child) for child, parent, stat in rows if int(parent) == pid and not stat.startswith("Z")]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _await_gone(is_there: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DOWN_WITHIN_S
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_there()


# ---- the database


def start_postgres(ledger: Ledger) -> str:
    """The URL of a Postgres database of our own, which listens on the loopback interface."""
    programs = find_postgres()
    user, folder = _choose_postgres_user(ledger.folder)
    password_file = folder.with_suffix(".password")
    if not password_file.exists():
        password_file.touch(mode=0o600)
        password_file.write_text(secrets.token_hex(16), "utf-8")
        if user:
            shutil.chown(password_file, POSTGRES_USER)
        options = ["--pgdata", str(folder), "--username", "holdfast", "--auth", "scram-sha-256"]
        options += ["--encoding", "UTF8", "--no-locale"]  # the user's may be of another encoding, or not installed
        made = subprocess.run(
            [str(programs / "initdb"), *options, "--pwfile", str(password_file)],
            capture_output=True, encoding="utf-8", errors="replace", check=False, cwd="/", **user,
        )  # fmt: skip
        if made.returncode:
            password_file.unlink()
            raise RunStopped(f"initdb failed: {made.stderr.strip()}")
    port = ledger.known.get("postgres", {}).get("port") or free_port()
    if not ledger.is_alive("postgres"):
        # No socket in a folder: its address may have 107 bytes only.
        options = ["-D", str(folder), "-h", "127.0.0.1", "-p", str(port), "-k", ""]
        start(ledger, "postgres", [str(programs / "postgres"), *options], {}, user, port=port)
        _await("Postgres", lambda: _is_ready(programs, port), ledger.folder / "postgres.log")
    return f"postgresql+asyncpg://holdfast:{password_file.read_text('utf-8')}@127.0.0.1:{port}/postgres"


def _choose_postgres_user(state: Path) -> tuple[dict[str, Any], Path]:
    """Who runs Postgres, which refuses to be root, and where its data lie: where that user may go."""
    if os.geteuid() != 0:
        return {}, state / "postgres"
    home = Path(pwd.getpwnam(POSTGRES_USER).pw_dir)
    name = f"holdfast-{hashlib.sha256(str(state).encode()).hexdigest()[:12]}"
    return {"user": POSTGRES_USER, "group": POSTGRES_USER, "extra_groups": []}, home / name


def find_postgres() -> Path:
    """The folder of Postgres' programs.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        raise ConfigError("POSTGRES=1: Postgres is not installed", hint="apt-get install postgresql")
    return found[-1].parent if found else Path(str(on_path)).parent


def _is_ready(programs: Path, port: int) -> bool:
    ready = subprocess.run(
        [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(port)], capture_output=True, check=False
    )
    return ready.returncode == 0


# ---- the server


def start_server(ledger: Ledger, database_url: str, port: int = 0) -> str:
    """The URL of the API of a Prefect server."""
    if ledger.is_alive("server"):
        return str(ledger.known["server"]["url"])
    port = port or ledger.known.get("server", {}).get("port") or _usual_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {
        "PREFECT_HOME": str(ledger.folder / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_UI_API_URL": url,
        "DO_NOT_TRACK": "1",
    }
    environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url or sqlite_url(ledger.folder / "prefect.db")
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    start(ledger, "server", command, environment, url=url, port=port, postgres=bool(database_url))
    _await("Prefect's server", lambda: is_healthy(url), ledger.folder / "server.log")
    return url


def sqlite_url(path: Path) -> str:
    """The URL of a database in a file, over a single connection.

    Prefect's server has several connections to a file, which lock one another out; and where the garbage collector
    comes upon a cursor of one that waits for its lock, the whole server waits, for up to a minute. It has a single one
    to what is called ":memory:", and a parameter of that name, which SQLite doesn't know, is enough to be called so.
    """
    return f"sqlite+aiosqlite:///file:{quote(str(path))}?connections=:memory:&uri=true"


def _usual_port() -> int:
    with contextlib.suppress(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{USUAL_PORT}", trust_env=False)
        return free_port()
    return USUAL_PORT


def _await(what: str, is_ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not is_ready():
        if time.monotonic() > deadline:
            raise RunStopped(f"{what} did not start within {READY_WITHIN_S:.0f} s", hint=f"{log} has its output")
        time.sleep(0.1)


# ---- pools, workers, deployments


def make_pools() -> None:
    """The server has the work pools, whose flow runs are processes of this repository on this machine."""
    with get_client(sync_client=True) as client:
        template = describe_process()
        for name, description in POOLS.items():
            try:
                client.read_work_pool(name)
                client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
            except ObjectNotFound:
                pool = WorkPoolCreate(name=name, type="process", base_job_template=template, description=description)
                client.create_work_pool(pool)
            print(f"work pool   {name}")


def describe_process() -> dict[str, Any]:
    """The base job template of a pool whose flow runs are processes of this repository on this machine.

    With the command given, a worker starts it at once; otherwise it first prepares a workspace, which takes seconds.
    """
    template = ProcessWorker.get_default_base_job_template()
    variables = template["variables"]["properties"]
    variables["command"]["default"] = f"{sys.executable} -m prefect.engine"
    variables["working_dir"]["default"] = str(ROOT)
    return template


def start_worker(ledger: Ledger, pool: str, url: str, environment: Mapping[str, str] | None = None) -> None:
    """A worker for the pool lives; flow runs get its environment."""
    name = f"worker-{pool}"
    if ledger.is_alive(name):
        return
    known = {
        "PREFECT_API_URL": url,
        "PREFECT_WORKER_QUERY_SECONDS": str(QUERY_EVERY_S),
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool", pool, "--name", name]
    start(ledger, name, command, known | dict(environment or {}))
    print(f"worker      {name}")


def deploy(url: str) -> None:
    """All deployments of ``prefect.yaml`` are on the server."""
    command = ["--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "--all"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *command],
        env=os.environ | {"PREFECT_API_URL": url, "DO_NOT_TRACK": "1"},
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunStopped(f"prefect deploy failed:\n{done.stdout}{done.stderr}".rstrip())
    print("deployments train, attempt, evaluate, audit, prune, sweep, drill")


app = App(name="python -m deployments.local", help=__doc__.partition("\n")[0], version_flags=[])


@app.command
def up(*, postgres: bool = False) -> None:
    """A server, work pools, workers, deployments and automations are there; what is there already stays.

    Args:
        postgres: with a Postgres database, instead of a file.
    """
    bypass_proxy()
    STATE.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(STATE)
    if ledger.is_alive("server") and ledger.known["server"]["postgres"] != postgres:
        has = "Postgres" if not postgres else "a file"
        raise ConfigError(f"the server that is up keeps its data in {has}", hint="make down, then again")
    url = start_server(ledger, start_postgres(ledger) if postgres else "")
    with temporary_settings({PREFECT_API_URL: url}):
        make_pools()
        make_automations()
        deploy(url)
    for pool in POOLS:
        start_worker(ledger, pool, url)
    print(f"UI          {url.removesuffix('/api')}")
    print(f"output      {STATE}")
    print(f"your shell  export PREFECT_API_URL={url}")


@app.command
def down() -> None:
    """What up has started has ended; attempts save what they have trained first."""
    ledger = Ledger(STATE)
    for name in sorted(ledger.known, key=_order):
        if end(ledger, name):
            print(f"ended       {name}")


def _order(name: str) -> int:
    """What starts attempts first, then what trains, then the server, then its database."""
    return ["worker-stable", "worker-gpu", "server", "postgres"].index(name)


if __name__ == "__main__":
    sys.exit(run_app(app))
