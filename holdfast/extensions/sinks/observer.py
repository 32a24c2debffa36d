"""The processes that send a run's metrics to its sinks: one process for each sink, which is told of each commit."""

import contextlib
import contextvars
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from holdfast.attempt.observers import AttemptView, Observer
from holdfast.config import RunConfig
from holdfast.extensions.sinks.classes import check_usable
from holdfast.extensions.sinks.orders import CONFIG_VARIABLE, SinkOrder
from holdfast.journal import Commit
from holdfast.rank.spawn import Process, start_process
from holdfast.store.modules import python_command

log = logging.getLogger(__name__)

# The longest wait for the sinks when a run is complete, and when an attempt is stopped. After a stop the wait is
# shorter, because the next attempt sends the missing steps.
COMPLETE_WITHIN_S = 60.0
STOPPED_WITHIN_S = 3.0
# How long a sink's process may run after the end of an attempt that hasn't completed the run.
LINGER_S = 20.0
# How many times a process that has died is started again.
RESTARTS = 3


class Sending(Observer):
    """An observer that starts the process of each of a run's sinks, and tells it of each commit.

    While the run trains, the attempt never waits for these processes. They read the commits from the store themselves.

    Raises:
        ConfigError: a sink can't be used on this machine.
    """

    def __init__(self, config: RunConfig) -> None:
        check_usable(config.log.sinks)
        self._processes = [SinkProcess(name) for name in config.log.sinks]

    def opened(self, attempt: AttemptView) -> None:
        self._tell(attempt, SinkOrder())

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        # before `opened` is called, an adopted commit isn't verified yet
        if any(each.is_started for each in self._processes):
            self._tell(attempt, SinkOrder())

    def _tell(self, attempt: AttemptView, order: SinkOrder) -> None:
        for each in self._processes:
            each.start(attempt.config, attempt.number)
            each.tell(order)

    def ended(self, attempt: AttemptView) -> None:
        started = [each for each in self._processes if each.is_started]
        is_complete = bool(started) and attempt.is_complete
        within_s = COMPLETE_WITHIN_S if is_complete else STOPPED_WITHIN_S
        for each in started:
            each.tell(SinkOrder(is_end=True, is_complete=is_complete, within_s=within_s if is_complete else LINGER_S))
        _await(started, within_s + 1)


def _await(processes: Iterable["SinkProcess"], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for each in processes:
        each.await_end(max(0.0, deadline - time.monotonic()))


class SinkProcess:
    """The process of one sink, ``python -m holdfast.extensions.sinks NAME``, in a new session.

    The end of its standard input tells it that the attempt has died.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: Process | None = None
        self._reader = threading.Thread()
        self._starts = 0

    @property
    def is_started(self) -> bool:
        """Return whether the process was ever started."""
        return self._process is not None

    def start(self, config: RunConfig, attempt: int) -> None:
        """Start the process, or start it again if it has died."""
        if self._process is not None:
            if self._process.poll() is None or self._starts > RESTARTS:
                return
            self._process.stdin.close()
        self._starts += 1
        path = Path(config.log.folder).absolute() / config.run / f"sink-{self._name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = python_command("-m", "holdfast.extensions.sinks", self._name, str(attempt))
        with path.open("ab") as output:
            process = start_process(command, os.environ | {CONFIG_VARIABLE: config.model_dump_json()}, output)
        # writes must not block, because training must not wait for a process that reads nothing
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        # The thread runs in this thread's context, so that Prefect shows its warnings with the attempt's flow run.
        context = contextvars.copy_context()
        self._reader = threading.Thread(target=context.run, args=(_log_lines, process, self._name, path), daemon=True)
        self._reader.start()

    def tell(self, order: SinkOrder) -> None:
        """Send an order. After the last order, close the pipe."""
        if self._process is None:
            return
        with contextlib.suppress(OSError, ValueError):  # ignore that the process has died, or reads nothing
            os.write(self._process.stdin.fileno(), f"{order.model_dump_json()}\n".encode())
        if order.is_end:
            self._process.stdin.close()

    def await_end(self, within_s: float) -> None:
        """Wait until the process has ended, for a limited time. Don't kill the process, because it ends by itself."""
        self._reader.join(within_s)
        if self._process is not None and not self._reader.is_alive():
            self._process.wait()


def _log_lines(process: Process, name: str, path: Path) -> None:
    with process.stdout:
        for line in process.stdout:
            log.warning("%s", line.rstrip())
    if code := process.wait():
        log.warning("the sink %s died with exit code %d; the run continues, and %s has its output", name, code, path)
