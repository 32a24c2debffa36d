"""A worker whose flow runs save before it ends: ``python -m deployments.worker gpu``.

Prefect's worker kills its flow runs when it gets a signal to end. Start this worker instead where only the worker gets
the signal, such as in a container or a service of systemd. Its health is at http://127.0.0.1:8080/health.
"""

import os
import signal
import subprocess
import sys

import tasks.untracked  # noqa: F401

from cyclopts import App

from deployments.ledger import own_temporary, tell_workers
from holdfast.terminal import interrupt
from holdfast.terminal.command import run_app

app = App(name="python -m deployments.worker", help=__doc__.partition("\n")[0], version_flags=[])


@app.default
def main(pool: str, /) -> int:
    """Start a worker for a work pool. On SIGTERM or Ctrl-C, let its flow runs save, then end it.

    Args:
        pool: the name of the work pool.
    """
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--with-healthcheck"]
    environment = os.environ | {"TMPDIR": own_temporary()}
    signal.signal(signal.SIGTERM, interrupt.end)
    # In a session of its own, so that Ctrl-C reaches this process alone.
    worker = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return worker.wait()
    finally:
        if worker.poll() is None:
            tell_workers([worker.pid])
            worker.wait()


if __name__ == "__main__":
    sys.exit(run_app(app))
