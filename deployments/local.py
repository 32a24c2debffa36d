"""Start or end a server, work pools and workers on this machine: ``make up`` and ``make down``.

The database, the secret and the output of all processes are in one folder outside of the repository, which only you may
enter: HOLDFAST_STATE, or ~/.local/state/holdfast. The server requires the secret in the file `auth` of this folder.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

import tasks.untracked  # noqa: F401

from cyclopts import App
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from deployments.gpus import WorkerPlan, describe_gpu, end_others, find_leftover, plan_workers
from deployments.ledger import (
    ROOT,
    ProcessLedger,
    await_ready,
    check_current,
    check_owner,
    end_processes,
    launch_process,
    locked,
    own_temporary,
)
from deployments.pools import Kind
from deployments.postgres import start_postgres
from deployments.setup import set_up
from holdfast.errors import ConfigError
from holdfast.recipe.permission import RECIPES
from holdfast.terminal.command import run_app
from tasks.credentials import AUTH, STATE, make_secret, new_auth, open_state
from tasks.lost_runs import end_lost
from tasks.server import bypass_proxy, choose_port, describe_server, is_healthy

USUAL_PORT = 4200
SEAL = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
# How often a worker asks for work, in seconds.
QUERY_EVERY_S = 1.0


# ---- the server


def start_server(ledger: ProcessLedger, database_url: str, port: int = 0) -> str:
    """Start a Prefect server that requires the secret in ``auth``, unless one is running. Return its API's URL."""
    if ledger.is_alive("server"):
        return str(ledger.known["server"]["url"])
    port = port or choose_port(ledger.known.get("server", {}).get("port"), USUAL_PORT)
    url = f"http://127.0.0.1:{port}/api"
    environment = describe_server(url, own_auth(ledger)) | {
        "PREFECT_HOME": str(ledger.folder / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_UI_API_URL": url,
        "PREFECT_UI_STATIC_DIRECTORY": str(ledger.folder / "ui"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database_url or sqlite_url(ledger.folder / "prefect.db"),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    launch_process(ledger, "server", command, environment, umask=0o077, url=url, port=port, postgres=bool(database_url))
    print(f"server      {url.removesuffix('/api')}   starts", flush=True)
    await_ready("Prefect's server", lambda: is_healthy(url), ledger, "server")
    seal_pages(ledger.folder / "ui", url)
    return url


def seal_pages(folder: Path, url: str) -> None:
    """Allow the UI's pages to connect only to their own server, by a content security policy.

    Without this policy, Prefect's UI sends a request to amplitude.com even if usage data is off. The server copies the
    pages to this folder when it starts, unless the folder already has the pages of the server's version.
    """
    own = url.removesuffix("/api")
    policy = f"connect-src {own} {own.replace('http', 'ws', 1)}"
    tag = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    for page in folder.rglob("index.html"):
        text = SEAL.sub("", page.read_text("utf-8"))
        page.write_text(text.replace("<head>", f"<head>{tag}", 1), "utf-8")


def own_auth(ledger: ProcessLedger) -> str:
    """Return the server's secret. The first call creates the secret."""
    return make_secret(ledger.folder / AUTH, new_auth())


def sqlite_url(path: Path) -> str:
    """Return the URL of an SQLite file that Prefect's server opens with a single connection.

    By default the server opens several connections to a file, and a connection may have to wait until another one gives
    up its lock. If Python's garbage collector then meets a cursor that waits for a lock, the whole server stalls for up
    to a minute. The server uses a single connection if the URL contains ":memory:". So this URL has ":memory:" in a
    parameter, which SQLite ignores.
    """
    return f"sqlite+aiosqlite:///file:{quote(str(path))}?connections=:memory:&uri=true"


# ---- workers


def start_worker(
    ledger: ProcessLedger, pool: str, url: str, environment: Mapping[str, str] | None = None, kind: Kind = "process"
) -> None:
    """Start a worker for the pool, unless one is running. Flow runs inherit the worker's environment and secret."""
    name = f"worker-{pool}"
    if ledger.is_alive(name):
        return
    launch_process(
        ledger, name, _describe_worker(pool, name, kind), _environment(ledger, url) | dict(environment or {})
    )
    print(f"worker      {name}")


def start_gpu_worker(ledger: ProcessLedger, name: str, gpu: str, url: str) -> None:
    """Start a worker of the pool `gpu` that sees one GPU and runs one flow run at a time, unless it is running already.

    Don't start the worker while a process of an earlier worker still uses the GPU.
    """
    if ledger.is_alive(name):
        return
    if (holder := find_leftover(gpu)) is not None:
        print(f"left out    {name}   process {holder} still uses its GPU; make up again when this process has ended")
        return
    command = [*_describe_worker("gpu", name), "--limit", "1"]
    launch_process(ledger, name, command, _environment(ledger, url) | describe_gpu(gpu), gpu=gpu)
    print(f"worker      {name}   {gpu}")


def start_gpu_workers(ledger: ProcessLedger, plan: WorkerPlan, url: str) -> None:
    """Start the planned workers of the pool `gpu` that aren't running yet, and end workers that aren't in the plan."""
    for name in end_others(ledger, plan):
        print(f"ended       {name}")
    for note in plan.notes:
        print(f"note        {note}")
    for name, gpu in plan.gpus.items():
        if gpu:
            start_gpu_worker(ledger, name, gpu, url)
        else:
            start_worker(ledger, "gpu", url)


def _describe_worker(pool: str, name: str, kind: Kind = "process") -> list[str]:
    return [sys.executable, "-m", "prefect", "worker", "start", "--type", kind, "--pool", pool, "--name", name]


def allow_recipes(named: str) -> str:
    """Return the recipes that flow runs may train: Holdfast's, this repository's, and further ones.

    If the user has set HOLDFAST_ALLOWED_RECIPES, its entries replace the recipes of Holdfast and of this repository.

    Args:
        named: the further entries, separated by commas.
    """
    usual = os.environ.get(RECIPES, f"holdfast.recipes, {ROOT}/")
    return ", ".join(filter(None, (usual, named)))


def _environment(ledger: ProcessLedger, url: str) -> dict[str, str]:
    own = {"PREFECT_WORKER_QUERY_SECONDS": str(QUERY_EVERY_S), "TMPDIR": own_temporary()}
    return access(ledger, url) | own


def access(ledger: ProcessLedger, url: str) -> dict[str, str]:
    """Return the environment variables that a client of the server needs."""
    return {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": own_auth(ledger)}


app = App(name="python -m deployments.local", help=__doc__.partition("\n")[0], version_flags=[])


@app.command
def up(*, postgres: bool = False, gpus: str = "", recipes: str = "") -> None:
    """Start a server, work pools, workers, deployments and automations. Running processes are not restarted.

    Args:
        postgres: use a Postgres database instead of a file.
        gpus: start one worker for each GPU, for this number of GPUs or for all, instead of one worker for the machine.
        recipes: recipes that flow runs may train, beside those of this repository, as in HOLDFAST_ALLOWED_RECIPES.
    """
    bypass_proxy()
    open_state(STATE)
    with locked(STATE):
        ledger = ProcessLedger(STATE)
        check_owner(ledger)
        check_current(ledger)
        plan = plan_workers(gpus, ledger)
        if ledger.is_alive("server") and ledger.known["server"]["postgres"] != postgres:
            has, asked = ("a file", "Postgres") if postgres else ("Postgres", "a file")
            raise ConfigError(
                f"a Prefect server is already running; its database is {has}, and this command would use {asked}",
                hint="run make down, then try again",
            )
        url = start_server(ledger, start_postgres(ledger) if postgres else "")
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: own_auth(ledger)}):
            set_up("process")
            for flow_run in end_lost():
                print(f"crashed     {flow_run.name}   the flow run's process is gone")
        os.environ[RECIPES] = allow_recipes(recipes)  # the workers and their flow runs inherit this variable
        start_worker(ledger, "stable", url)
        start_gpu_workers(ledger, plan, url)
    print(f"UI          {url.removesuffix('/api')}   asks for a password: the whole line in {STATE / AUTH}")
    print(f"output      {STATE}")
    print(f"your shell  export PREFECT_API_URL={url}")
    print("            the commands here find the password by themselves; prefect's own commands need")
    print(f'            export PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(STATE / AUTH))})"')


@app.command
def down() -> None:
    """End all processes that `up` has started. Attempts save their progress first."""
    has_ended = False
    if STATE.is_dir():
        open_state(STATE)
        with locked(STATE):
            ledger = ProcessLedger(STATE)
            check_owner(ledger)
            for _, names in groupby(sorted(ledger.known, key=_order), key=_order):
                for name in end_processes(ledger, names):
                    has_ended = True
                    print(f"ended       {name}", flush=True)
    if not has_ended:
        print("no process of make up runs on this machine")


def _order(name: str) -> int:
    """Return a process's place in the order of ending; processes with the same place are ended together.

    The order is: the worker that starts attempts, the workers that train, the server, the database.
    """
    places = {"worker-stable": 0, "server": 2, "postgres": 3}
    return places.get(name, 1)


if __name__ == "__main__":
    sys.exit(run_app(app))
