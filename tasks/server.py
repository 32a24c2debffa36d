"""A temporary Prefect server for a command, if no server is configured.

Prefect's own temporary server survives forever when the process that started it is killed. This server watches its
standard input, so it learns that its command has ended, even if the command is killed. It then ends once no command
has used it for some minutes; see `tasks.lingering`.
"""

import contextlib
import gc
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import tasks.untracked  # noqa: F401

import httpx
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from holdfast.errors import ConfigError, RunStopped
from holdfast.store.modules import describe_modules
from tasks.credentials import new_auth
from tasks.lingering import SharedServer, await_unused, shared_server

DRAIN_WITHIN_S = 5.0
# A start takes less than this many seconds if the database exists already.
USUAL_START_S = 6.0
# A start may take this many times Prefect's own limit, 20 s. With seven processes on a core and a new database it takes
# over 60 s.
PATIENCE = 15
# The limit for a configured server's first answer. A server on a busy machine may take seconds to answer.
ANSWERS_WITHIN_S = 60.0
# These ports are below the range from which Linux gives ports to clients. A port in that range may be in use by a
# client when the server starts again.
LASTING_PORTS = range(20_000, 32_768)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# The limit for the temporary server to write pending requests after its command has ended.
ENDS_WITHIN_S = 5.0

# The age, in seconds, at which the server deletes events; it checks once an hour. A heartbeat is useful for seconds,
# but Prefect keeps events for 7 days by default, and a run's heartbeats of a week would take gigabytes of the database.
RETENTION = "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES"
KEPT_S = {"holdfast.heartbeat": 3600, "prefect.flow-run.heartbeat": 86_400, "prefect.artifact.updated": 86_400}

log = logging.getLogger("holdfast.server")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a Prefect API: the configured one, or a temporary one on a free loopback port.

    Only this user's processes know the temporary server's secret.

    Raises:
        ConfigError: the configured server refuses the secret, or the temporary server can't write its folder.
        RunStopped: the configured server doesn't answer, or the temporary server didn't start.
    """
    bypass_proxy()
    configured = PREFECT_API_URL.value()
    if configured:
        check_access(configured)
        yield configured
        return
    _make_home()
    with (
        shared_server(PREFECT_HOME.value()) as shared,
        _found_or_started(shared) as (url, auth),
        temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth}),
    ):
        try:
            yield url
        finally:
            _send_what_is_left()


@contextlib.contextmanager
def _found_or_started(shared: SharedServer | None) -> Iterator[tuple[str, str]]:
    """Yield the URL and the secret of a server that lives already, or else of a new one.

    Raises:
        RunStopped: the new server didn't start.
    """
    found = shared.find() if shared else None
    if found and is_healthy(found.url):
        yield found.url, found.auth
        return
    port, auth = free_port(), new_auth()
    url = f"http://127.0.0.1:{port}/api"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tasks.server", str(port)],
        env=os.environ | describe_server(url, auth) | describe_modules(),
        stdin=subprocess.PIPE,
        # Start the server in a new session, so that only the flow gets the signals of Ctrl-C and a closed terminal. The
        # flow needs the server until its own end.
        start_new_session=True,
    )
    is_shared = False
    try:
        await_healthy(process, url)
        if shared:
            shared.record(process.pid, url, auth)
            is_shared = True
        yield url, auth
    finally:
        _release_server(process) if is_shared else _end_server(process)


def check_configured(setting: str) -> None:
    """Raise ConfigError if no server is configured, because a temporary server has none of the needed deployments.

    Args:
        setting: the setting that needs deployments, for the message.
    """
    if not PREFECT_API_URL.value():
        raise ConfigError(
            f"{setting} needs a server with deployments, and PREFECT_API_URL is not set",
            hint="make up starts one on this machine and prints what to export",
        )


def describe_server(url: str, auth: str) -> dict[str, str]:
    """Return the environment of a Prefect server that requires a secret. Only its own pages may read its answers.

    The server keeps heartbeats for an hour, unless this process's environment sets how long it keeps events.

    Args:
        url: the URL of the server's API.
        auth: the secret, as ``user:password``.
    """
    return {
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url.removesuffix("/api"),
        RETENTION: os.environ.get(RETENTION) or json.dumps(KEPT_S),
    }


def check_access(url: str) -> None:
    """Check that a server answers, and that it accepts the configured secret.

    Raises:
        ConfigError: the server refuses the secret.
        RunStopped: the server doesn't answer.
    """
    if PREFECT_API_KEY.value():
        return  # the server is Prefect Cloud, whose key isn't checked here
    auth = PREFECT_API_AUTH_STRING.value()
    user, _, password = (auth or "").partition(":")
    try:
        answer = httpx.get(f"{url}/admin/version", auth=(user, password) if auth else None, timeout=ANSWERS_WITHIN_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise RunStopped(
            f"Prefect's server at {url} doesn't answer: {error or type(error).__name__}",
            hint="start it, as make up does on this machine; or unset PREFECT_API_URL, also in your Prefect profile: "
            "then the command starts a server for itself",
        ) from None
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(
            f"Prefect's server at {url} {'refuses the PREFECT_API_AUTH_STRING' if auth else 'asks for a password'}",
            hint='export PREFECT_API_AUTH_STRING="$(cat ~/.local/state/holdfast/auth)" on the machine of make up',
        )


def _make_home() -> None:
    """Make the folder of Prefect's database, because a container's user often has no home folder.

    Raises:
        ConfigError: the folder can't be made, or isn't writable.
    """
    home = PREFECT_HOME.value()
    try:
        home.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(home, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(
            f"Prefect can't write to its folder {home}: {problem}", hint="export PREFECT_HOME=/a/folder/of/yours"
        )


def await_healthy(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until the server answers.

    Raises:
        RunStopped: the server has ended, or it did not start in time.
    """
    began = time.monotonic()
    within_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value() * PATIENCE
    is_told = False
    while process.poll() is None and (waited_s := time.monotonic() - began) < within_s:
        if is_healthy(url):
            return
        if waited_s > USUAL_START_S and not is_told:
            log.info("still waiting for Prefect's server; at its first start it creates its database")
            is_told = True
        time.sleep(0.05)
    raise RunStopped("Prefect's temporary server did not start", hint="prefect server start shows why")


def is_healthy(url: str) -> bool:
    """Return whether a server on this machine answers at its API's URL."""
    with contextlib.suppress(httpx.TransportError):
        # Don't load certificates: plain HTTP doesn't need them, and loading takes 20 ms each time.
        return httpx.get(f"{url}/health", trust_env=False, verify=False).is_success
    return False


def bypass_proxy() -> None:
    """Exempt servers on this machine from the user's HTTP proxy, in this process and its children.

    A proxy can't reach the loopback interface, but Prefect's clients would use it nevertheless.
    """
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if exempt.strip() != "*":
        hosts = dict.fromkeys([*filter(None, map(str.strip, exempt.split(","))), *LOOPBACK])
        os.environ.update(dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts)))


def _release_server(process: "subprocess.Popen[bytes]") -> None:
    """Let the temporary server live on until it is unused; see `tasks.lingering`."""
    assert process.stdin is not None
    process.stdin.close()
    process.returncode = 0  # keep Popen from warning that the server still runs: no process waits for it


def _end_server(process: "subprocess.Popen[bytes]") -> None:
    """End the temporary server by closing its standard input; kill it if it doesn't end in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine the server may still import
            process.wait(ENDS_WITHIN_S + 1)
    finally:
        process.kill()
        process.wait()


def _send_what_is_left() -> None:
    """Send pending logs and events before the server ends, because later retries would delay the exit by a minute."""
    APILogWorker.drain_all(timeout=DRAIN_WITHIN_S)
    EventsWorker.drain_all(timeout=DRAIN_WITHIN_S)


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def choose_port(*wanted: int | None) -> int:
    """Return the first of these ports that is free on the loopback interface; if none is free, any other free port.

    Never return a port that another program uses, because clients would send the secret to that program.
    """
    for port in (*filter(None, wanted), *random.sample(LASTING_PORTS, 20)):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            return port
    return free_port()


def main(port: int) -> None:
    """Serve Prefect's API on the loopback interface until no command uses it."""
    gc.disable()  # no garbage collection during imports: it takes a seventh of the start and frees nothing
    threading.Thread(target=_end_unused, daemon=True).start()
    import uvicorn

    os.environ.update(PREFECT_UI_ENABLED="0", PREFECT__SERVER_EPHEMERAL="1", PREFECT__SERVER_FINAL="1")
    # Registering Prefect's block types, which no flow here uses, takes a quarter of the CPU time of a first start.
    os.environ.setdefault("PREFECT_SERVER_REGISTER_BLOCKS_ON_START", "0")
    from prefect.server.api.server import create_app

    app = create_app()
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def _end_unused() -> None:
    # Don't read sys.stdin: the interpreter would abort if it exited while this thread holds the lock of sys.stdin.
    while os.read(0, 1):
        pass
    # Prefect logs a traceback for each interrupted request of the dead command. Nobody reads these tracebacks any more,
    # so drop them.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    await_unused(PREFECT_HOME.value())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ENDS_WITHIN_S)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
