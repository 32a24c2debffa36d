"""A server, work pools and workers on this machine: ``make up`` and ``make down``.

Their database, secret and output are in one folder outside of the repository, which only you may enter: HOLDFAST_STATE,
or ~/.local/state/holdfast. The server requires the secret in the folder's file `auth`.
"""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tasks.untracked  # noqa: F401

from cyclopts import App
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from deployments.automations import make_automations
from deployments.ledger import ROOT, Ledger, await_ready, check_current, check_owner, end, locked, start
from deployments.postgres import start_postgres
from holdfast.command import run_app
from holdfast.errors import ConfigError, RunStopped
from tasks.credentials import AUTH, STATE, make_secret, new_auth, open_state
from tasks.server import bypass_proxy, describe_server, free_port, is_healthy

POOLS = {
    "stable": "For flows that only watch and tidy up: train, prune, sweep, drill.",
    "gpu": "For flows that use the GPU: attempt, evaluate, audit.",
}
USUAL_PORT = 4200
SEAL = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
# How often a worker asks for work, in seconds.
QUERY_EVERY_S = 1.0


# ---- the server


def start_server(ledger: Ledger, database_url: str, port: int = 0) -> str:
    """Start a Prefect server that requires the secret in ``auth``, unless it runs already. Return its API's URL."""
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
    start(ledger, "server", command, environment, url=url, port=port, postgres=bool(database_url))
    await_ready("Prefect's server", lambda: is_healthy(url), ledger, "server")
    seal_pages(ledger.folder / "ui", url)
    return url


def seal_pages(folder: Path, url: str) -> None:
    """Let the UI's pages connect to their own server alone, by a content security policy.

    Prefect's UI asks amplitude.com for its settings even if usage data is off. The server copies the pages to
    this folder when it starts, unless a copy of its own version is there already.
    """
    own = url.removesuffix("/api")
    policy = f"connect-src {own} {own.replace('http', 'ws', 1)}"
    tag = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    for page in folder.rglob("index.html"):
        text = SEAL.sub("", page.read_text("utf-8"))
        page.write_text(text.replace("<head>", f"<head>{tag}", 1), "utf-8")


def own_auth(ledger: Ledger) -> str:
    """Return the server's secret. The first call makes it."""
    return make_secret(ledger.folder / AUTH, new_auth())


def sqlite_url(path: Path) -> str:
    """Return the URL of a database in a file that Prefect's server opens with a single connection.

    By default the server opens several connections to a file, which lock one another out. If the garbage collector
    then meets a cursor that waits for a lock, the whole server stalls for up to a minute. The server uses
    a single connection if the URL contains ":memory:". So this URL has that value in a parameter, which SQLite ignores.
    """
    return f"sqlite+aiosqlite:///file:{quote(str(path))}?connections=:memory:&uri=true"


def choose_port(*wanted: int | None) -> int:
    """Return the first of these ports that is free on the loopback interface, or else any free one.

    Never use a port of another program: clients would send it the secret.
    """
    for port in filter(None, wanted):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            return port
    return free_port()


# ---- pools, workers, deployments


def make_pools() -> None:
    """Make or update the work pools, whose flow runs are processes of this repository on this machine."""
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
    """Return the base job template of a pool whose flow runs are processes of this repository on this machine.

    The template names the command, so that a worker starts it at once. Without a command, a worker first prepares a
    workspace, which takes seconds.
    """
    template = ProcessWorker.get_default_base_job_template()
    variables = template["variables"]["properties"]
    variables["command"]["default"] = f"{shlex.quote(sys.executable)} -m prefect.engine"
    variables["working_dir"]["default"] = str(ROOT)
    return template


def start_worker(ledger: Ledger, pool: str, url: str, environment: Mapping[str, str] | None = None) -> None:
    """Start a worker for the pool, unless one runs already. Its flow runs inherit its environment, with the secret."""
    name = f"worker-{pool}"
    if ledger.is_alive(name):
        return
    known = access(ledger, url) | {"PREFECT_WORKER_QUERY_SECONDS": str(QUERY_EVERY_S)}
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool", pool, "--name", name]
    start(ledger, name, command, known | dict(environment or {}))
    print(f"worker      {name}")


def access(ledger: Ledger, url: str) -> dict[str, str]:
    """Return the environment of a client of the server."""
    return {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": own_auth(ledger)}


def deploy(ledger: Ledger, url: str) -> None:
    """Put all deployments of ``prefect.yaml`` on the server."""
    command = ["--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "--all"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *command],
        env=os.environ | access(ledger, url),
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunStopped(f"prefect deploy failed:\n{done.stdout}{done.stderr}".rstrip())
    print("deployments train, attempt, evaluate, audit, prune, sweep, drill")


app = App(name="python -m deployments.local", help=__doc__.partition("\n")[0], version_flags=[])


@app.command
def up(*, postgres: bool = False) -> None:
    """Start a server, work pools, workers, deployments and automations. Leave running processes alone.

    Args:
        postgres: use a Postgres database instead of a file.
    """
    bypass_proxy()
    open_state(STATE)
    with locked(STATE):
        ledger = Ledger(STATE)
        check_owner(ledger)
        check_current(ledger)
        if ledger.is_alive("server") and ledger.known["server"]["postgres"] != postgres:
            has = "Postgres" if not postgres else "a file"
            raise ConfigError(f"the server that is up keeps its data in {has}", hint="make down, then try again")
        url = start_server(ledger, start_postgres(ledger) if postgres else "")
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: own_auth(ledger)}):
            make_pools()
            make_automations()
            deploy(ledger, url)
        for pool in POOLS:
            start_worker(ledger, pool, url)
    print(f"UI          {url.removesuffix('/api')}   asks for a password: the whole line in {STATE / AUTH}")
    print(f"output      {STATE}")
    print(f"your shell  export PREFECT_API_URL={url}")
    print("            the commands here find the password by themselves; prefect's own need")
    print(f'            export PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(STATE / AUTH))})"')


@app.command
def down() -> None:
    """End everything that `up` has started. Attempts save their progress first."""
    if not STATE.is_dir():
        return
    open_state(STATE)
    with locked(STATE):
        ledger = Ledger(STATE)
        check_owner(ledger)
        for name in sorted(ledger.known, key=_order):
            if end(ledger, name):
                print(f"ended       {name}")


def _order(name: str) -> int:
    """Return a process's place in the order of ending: starter of attempts, trainer, server, database."""
    return ["worker-stable", "worker-gpu", "server", "postgres"].index(name)


if __name__ == "__main__":
    sys.exit(run_app(app))
