"""Prefect's server for the time of one command, where none is configured.

Prefect has a temporary server of its own, but leaves it behind for ever when the process that started it is killed.
This one watches its standard input, and so ends with its parent, however that ends.
"""

import contextlib
import gc
import logging
import os
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
from tasks.credentials import new_auth

DRAIN_WITHIN_S = 5.0
# Longer than it takes where the database is there already.
USUAL_START_S = 6.0
# Of Prefect's own time to start, 20 s: seven processes to a core, and a database to make, take more than 60 s.
PATIENCE = 15
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# How long the temporary server may take to write what it was sent, once its command has ended.
ENDS_WITHIN_S = 5.0

log = logging.getLogger("holdfast.server")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a Prefect API: the configured one, or a temporary one on a free loopback port.

    Only this process and its threads know the temporary server's secret.

    Raises:
        ConfigError: the configured server asks for another secret, or the temporary one can't write its folder.
        RunStopped: the temporary server didn't start.
    """
    bypass_proxy()
    configured = PREFECT_API_URL.value()
    if configured:
        check_access(configured)
        yield configured
        return
    _make_home()
    port, auth = free_port(), new_auth()
    url = f"http://127.0.0.1:{port}/api"
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.server", str(port)],
        env=os.environ | describe_server(url, auth),
        stdin=subprocess.PIPE,
        # Ctrl-C and a closed terminal are for the flow, which needs its server to the end.
        start_new_session=True,
    )
    try:
        await_healthy(process, url)
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth}):
            try:
                yield url
            finally:
                _send_what_is_left()
    finally:
        end(process)


def describe_server(url: str, auth: str) -> dict[str, str]:
    """Return the environment of a Prefect server that asks for a secret and lets only its own pages read answers.

    Args:
        url: the URL of its API.
        auth: the secret, as ``user:password``.
    """
    return {
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url.removesuffix("/api"),
    }


def check_access(url: str) -> None:
    """Return if a server takes the configured secret, or can't be asked now.

    Raises:
        ConfigError: it doesn't.
    """
    if PREFECT_API_KEY.value():
        return  # Prefect Cloud's
    auth = PREFECT_API_AUTH_STRING.value()
    user, _, password = (auth or "").partition(":")
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"{url}/admin/version", auth=(user, password) if auth else None)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(
                f"Prefect's server at {url} {'refuses the PREFECT_API_AUTH_STRING' if auth else 'asks for a secret'}",
                hint='export PREFECT_API_AUTH_STRING="$(cat ~/.local/state/holdfast/auth)" on the machine of make up',
            )


def _make_home() -> None:
    """Make the folder of Prefect's database; a user of a container often has no home folder that exists.

    Raises:
        ConfigError: it can't be made, or isn't writable.
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
    """Return once the server answers.

    Raises:
        RunStopped: it has ended, or its time to start is up.
    """
    began = time.monotonic()
    within_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value() * PATIENCE
    is_told = False
    while process.poll() is None and (waited_s := time.monotonic() - began) < within_s:
        if is_healthy(url):
            return
        if waited_s > USUAL_START_S and not is_told:
            log.info("still waiting for Prefect's server; the first time it makes its database")
            is_told = True
        time.sleep(0.05)
    raise RunStopped("Prefect's temporary server did not start", hint="prefect server start shows why")


def is_healthy(url: str) -> bool:
    """Return whether a server of this machine answers at the URL of its API."""
    with contextlib.suppress(httpx.TransportError):
        # To read the certificates that nobody needs here takes 20 ms, each time.
        return httpx.get(f"{url}/health", trust_env=False, verify=False).is_success
    return False


def bypass_proxy() -> None:
    """Exempt servers of this machine from the user's HTTP proxy, in this process and in those that it starts.

    A proxy can't reach the loopback interface, and Prefect's clients ask it all the same.
    """
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if exempt.strip() != "*":
        hosts = dict.fromkeys([*filter(None, map(str.strip, exempt.split(","))), *LOOPBACK])
        os.environ.update(dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts)))


def end(process: "subprocess.Popen[bytes]") -> None:
    """End the temporary server: it ends by itself when its standard input does."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(ENDS_WITHIN_S + 1)
    finally:
        process.kill()
        process.wait()


def _send_what_is_left() -> None:
    """Send the logs and events that still wait. Without the server they would delay the exit by a minute of retries."""
    APILogWorker.drain_all(timeout=DRAIN_WITHIN_S)
    EventsWorker.drain_all(timeout=DRAIN_WITHIN_S)


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(port: int) -> None:
    """Serve Prefect's API on the loopback interface until the standard input ends."""
    gc.disable()  # what is imported stays: to look through it again and again takes a seventh of the time
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import uvicorn

    os.environ.update(PREFECT_UI_ENABLED="0", PREFECT__SERVER_EPHEMERAL="1", PREFECT__SERVER_FINAL="1")
    from prefect.server.api.server import create_app

    app = create_app()
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def _end_with_parent() -> None:
    # Not sys.stdin: its lock, held by this thread, would abort the interpreter when it ends for another reason.
    while os.read(0, 1):
        pass
    # Requests of the dead command are cut off, which Prefect reports with a traceback each. Nobody is left to read it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ENDS_WITHIN_S)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
