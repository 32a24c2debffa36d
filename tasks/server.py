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

import httpx
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings

from holdfast.errors import RunStopped

DRAIN_WITHIN_S = 5.0
# Longer than it takes where the database is there already.
USUAL_START_S = 6.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger("holdfast.server")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A Prefect API is reachable while the block lasts: the configured one, or a temporary one on a free loopback port.

    Raises:
        RunStopped: the temporary server didn't start.
    """
    bypass_proxy()
    configured = PREFECT_API_URL.value()
    if configured:
        yield configured
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    with subprocess.Popen([sys.executable, "-m", "tasks.server", str(port)], stdin=subprocess.PIPE) as process:
        try:
            await_healthy(process, url)
            with temporary_settings({PREFECT_API_URL: url}):
                try:
                    yield url
                finally:
                    _send_what_is_left()
        finally:
            process.terminate()


def await_healthy(process: "subprocess.Popen[bytes]", url: str) -> None:
    """The server answers.

    Raises:
        RunStopped: it has ended, or its time to start is up.
    """
    began = time.monotonic()
    within_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value() * 3
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
    """Whether a server of this machine answers at the URL of its API."""
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


def _send_what_is_left() -> None:
    """Logs and events that wait to be sent would, once the server is gone, hold up the exit for a minute of retries."""
    APILogWorker.drain_all(timeout=DRAIN_WITHIN_S)
    EventsWorker.drain_all(timeout=DRAIN_WITHIN_S)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(port: int) -> None:
    """Serve Prefect's API on the loopback interface until the standard input ends."""
    gc.disable()  # what is imported stays: to look through it again and again takes a seventh of the time
    import uvicorn

    os.environ.update(PREFECT_UI_ENABLED="0", PREFECT__SERVER_EPHEMERAL="1", PREFECT__SERVER_FINAL="1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the flow, which needs its server to the end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from prefect.server.api.server import create_app

    app = create_app()
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def _end_with_parent() -> None:
    # Not sys.stdin: its lock, held by this thread, would abort the interpreter when it ends for another reason.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(int(sys.argv[1]))
