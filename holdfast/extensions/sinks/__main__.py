"""`python -m holdfast.extensions.sinks NAME ATTEMPT`: send a run's numbers to a sink, in a child of an attempt.

The environment has the run's configuration. The attempt writes a `SinkOrder` to standard input as a line of JSON after
each commit, and at the end. If standard input ends without the last order, the attempt has died. Each line on standard
output is a warning for the attempt's log.
"""

import contextlib
import fcntl
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.config import RunConfig
from holdfast.errors import Superseded
from holdfast.extensions.sinks.classes import make_sink
from holdfast.extensions.sinks.delivery import deliver
from holdfast.extensions.sinks.orders import CONFIG_VARIABLE, DEAD, SinkOrder
from holdfast.journal import Journal
from holdfast.looking.sinks import Facts, Sink
from holdfast.store import open_store

# The nice value of a sink's process. A positive value lowers the priority, so that training doesn't wait for a sink.
NICENESS = 10
MAX_LETTERS = 200

Say = Callable[[str], None]


class Sender:
    """Sends a run's numbers to one sink.

    Only the first failure is reported. Each later order tries again, beginning after the last step that the sink has.
    """

    def __init__(self, name: str, config: RunConfig, attempt: int, say: Say) -> None:
        self._name = name
        self._config = config
        self._attempt = attempt
        self._say = say
        self._sink: Sink | None = None
        self._has_failed = False
        self._is_superseded = False

    def obey(self, order: SinkOrder) -> None:
        """Send the committed numbers that the sink lacks; on the last order, close the sink too."""
        try:
            if not self._is_superseded:
                self._deliver()
            if order.is_end and self._sink is not None:
                self._sink.close(order.is_complete)
        except Superseded:
            self._is_superseded = True
        except Exception as error:  # a sink's library may raise any error
            self._fail(error)

    def _deliver(self) -> None:
        if self._sink is None:
            journal = Journal(open_store(self._config.store), self._config.run)
            self._sink = make_sink(self._name, Facts.read(journal, self._config, self._attempt))
            self._sink.open()
        deliver(self._sink)

    def _fail(self, error: Exception) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(Exception):
                sink.close(False)
        if not self._has_failed:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_LETTERS]
            hint = f" (hint: {sink.hint})" if sink is not None and sink.hint else ""
            self._say(
                f"the sink {self._name} failed: {text}; the run continues, and the sink tries again at each "
                f"commit{hint}"
            )
        self._has_failed = True


def main() -> None:
    """Execute the orders on standard input until the last order or the attempt's death, then exit.

    The process exits within the last order's `within_s`, even if the sink still hangs.
    """
    os.nice(NICENESS)
    say = _take_output()
    name, config = sys.argv[1], RunConfig.model_validate_json(os.environ[CONFIG_VARIABLE])
    sender = Sender(name, config, int(sys.argv[2]), say)
    orders: queue.SimpleQueue[SinkOrder] = queue.SimpleQueue()
    lock = Path(config.log.folder).absolute() / config.run / f"sink-{name}.lock"
    worker = threading.Thread(target=_work, args=(sender, orders, lock), daemon=True)
    worker.start()
    order = SinkOrder()
    for line in sys.stdin:
        order = SinkOrder.model_validate_json(line)
        orders.put(order)
    if not order.is_end:
        order = DEAD
        orders.put(order)
    worker.join(order.within_s)
    if worker.is_alive() and order is not DEAD:
        say(f"the sink {name} hasn't taken all data in {order.within_s:.0f} s; the next holdfast train sends the rest")
    os._exit(0)  # os._exit doesn't wait for a library's thread, which may hang


def _work(sender: Sender, orders: "queue.SimpleQueue[SinkOrder]", lock: Path) -> None:
    with _locked(lock):
        order = SinkOrder()
        while not order.is_end:
            order = orders.get()
            while not order.is_end and not orders.empty():
                order = orders.get()
            sender.obey(order)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock for the block, so that the sink of a dead attempt ends before the next sink begins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _take_output() -> Say:
    """Redirect the libraries' prints to standard error. Return a function that writes a line to standard output."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # the attempt has ended, so no process reads the pipe
            own.write(line + "\n")
            own.flush()

    return say


if __name__ == "__main__":
    main()
