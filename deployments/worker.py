"""Run a worker whose flow runs save before the worker ends: ``python -m deployments.worker gpu``.

Prefect's worker kills its flow runs when it gets a signal to end. Start this worker instead if only the worker gets the
signal, for example in a container or a systemd service. It reports its health at http://127.0.0.1:8080/health.
"""

import os
import signal
import subprocess
import sys

import tasks.untracked  # noqa: F401

from cyclopts import App

from deployments.ledger import own_temporary, tell_workers
from holdfast.store.modules import describe_modules
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
    environment = os.environ | describe_modules() | {"TMPDIR": own_temporary()}
    signal.signal(signal.SIGTERM, interrupt.end)
    # Start the worker in a new session, so that Ctrl-C reaches only this process.
    worker = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return worker.wait()
    finally:
        if worker.poll() is None:
            tell_workers([worker.pid])
            worker.wait()


if __name__ == "__main__":
    sys.exit(run_app(app))
