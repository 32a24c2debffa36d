"""The queue of a rank's orders, and the decision when a rank has to save or stop."""

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

from accelerate.utils import broadcast_object_list

from holdfast.checkpoint import Saved
from holdfast.rank.messages import End, Order, Save, Stop, decode_order
from holdfast.training import Training

# To keep a deadline, reserve twice the longest step and the longest save so far, and a second for the commit.
SAFETY = 2.0
MARGIN_S = 1.0


class Orders:
    """The orders for all ranks, one after the other; `Save` and `Stop` take effect at once.

    Iterate over it to get the orders. The iteration ends with an `End`, with a `Stop` that has no deadline, on SIGTERM,
    when standard input ends, and with a line that is no order: see `check`.
    """

    def __init__(self, training: Training, report: Callable[[Saved], None]) -> None:
        """
        Args:
            report: called in another thread with each checkpoint, once it is durable.
        """
        self._training = training
        self._report = report
        self._several = training.accelerator.num_processes > 1
        self._queue: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._failure: Exception | None = None  # of the thread that reads
        self._stop_at = math.inf  # of time.monotonic()
        self._saving = threading.Event()
        self._last_pause = math.inf
        self._step_s = self._save_s = 0.0  # the longest step, and the longest urgent save
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        if training.accelerator.is_main_process:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # Not sys.stdin: this thread would hold its lock, and Python aborts at exit if it can't get that lock.
        try:
            with open(0, "rb", buffering=0, closefd=False) as lines:
                for line in lines:
                    order = decode_order(line)
                    if isinstance(order, Save):
                        self._saving.set()
                    elif not isinstance(order, Stop):
                        self._queue.put(order)
                    elif order.within_s is None:
                        break
                    else:
                        self._stop_at = min(self._stop_at, time.monotonic() + order.within_s)
        except Exception as error:
            self._failure = error
        finally:
            self._stop()

    def _stop(self) -> None:
        self._stop_at = 0.0
        self._queue.put(None)

    def is_stopping(self) -> bool:
        """Return whether to stop training here; all ranks get the same answer."""
        return self._ask_all(self._is_last_moment())

    def is_pausing(self) -> bool:
        """Return whether to pause training here, to save or to stop; all ranks get the same answer.

        Call it between all steps: it measures the longest step by the time between two calls.

        Raises:
            StoreError: the save that is under way has failed.
        """
        self._training.saver.check()
        now = time.monotonic()
        self._step_s, self._last_pause = max(self._step_s, now - self._last_pause), now
        return self._ask_all(self._is_last_moment() or self._saving.is_set())

    def begin_save(self, save: Callable[..., None], *, is_urgent: bool) -> None:
        """Begin a save. All saves are urgent until one has shown how long an urgent save takes.

        Args:
            save: called with ``is_urgent`` and with ``then``, the function to call once the checkpoint is durable.
            is_urgent: see `checkpoint.Saver.begin`.
        """
        self._saving.clear()
        is_urgent = is_urgent or not self._save_s
        save(is_urgent=is_urgent, then=self._note_urgent if is_urgent else self._report)
        self._last_pause = math.inf  # the time until the next call includes more than a step

    def _note_urgent(self, saved: Saved) -> None:
        self._save_s = max(self._save_s, saved.save_s)
        self._report(saved)

    def _is_last_moment(self) -> bool:
        if math.isinf(self._stop_at):
            return False
        # Before the first save its duration is unknown. A save that is under way has to end first, so count two.
        saves_s = self._save_s * (2 if self._training.saver.is_busy else 1)
        needed_s = SAFETY * (saves_s + self._step_s) + MARGIN_S if self._save_s else math.inf
        return time.monotonic() >= self._stop_at - needed_s

    def _ask_all(self, answer: bool) -> bool:
        return any(self._training.gather(answer)) if self._several else answer

    def __iter__(self) -> Iterator[Order]:
        while (order := self._next()) is not None and not isinstance(order, End):
            yield order

    def _next(self) -> Order | None:
        orders = [self._queue.get() if self._training.accelerator.is_main_process else None]
        if self._several:
            broadcast_object_list(orders)
        return orders[0]

    def check(self) -> None:
        """Raise the error that ended the orders, if any.

        Raises:
            RunStopped: a line was no order.
        """
        if self._failure is not None:
            raise self._failure
