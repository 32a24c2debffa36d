"""The queue of a rank's orders, and the decision when a rank has to save or stop."""

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

from accelerate.utils import broadcast_object_list

from holdfast.checkpoint import Saved
from holdfast.durations import Durations, Slowing
from holdfast.rank.messages import End, Order, Save, Stop, decode_order
from holdfast.training import Training


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
        self.is_ended = False  # by the attempt; not by a signal, or by another node
        self._stop_at = math.inf  # of time.monotonic()
        self._saving = threading.Event()
        self._last_pause = math.inf
        self._steps, self._urgent, self._saves = Durations(unknown_s=0.0), Durations(), Durations()
        self._slowing = Slowing()
        self._is_saving = False  # when the step in progress began
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        # The first rank of another node gets no orders, but the end of its input tells it that its node has to stop.
        if training.accelerator.is_local_main_process:
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
                        self.is_ended = True
                        self._stop_at = min(self._stop_at, time.monotonic() + order.within_s)
        except Exception as error:
            self._failure = error
        finally:
            self.is_ended = True
            self._stop()

    def _stop(self) -> None:
        self._stop_at = 0.0
        self._queue.put(None)

    def is_stopping(self) -> bool:
        """Return whether to stop training here; all ranks get the same answer."""
        return self._ask_all(self._is_last_moment())

    def is_pausing(self) -> bool:
        """Return whether to pause training here, to save or to stop; all ranks get the same answer.

        Call it between all steps: it measures steps by the time between two calls.

        Raises:
            StoreError: the save that is under way has failed.
        """
        self._training.saver.check()
        now = time.monotonic()
        if now > self._last_pause:
            self._steps.add(now - self._last_pause)
            self._slowing.add(now - self._last_pause, is_beside=self._is_saving)
        self._last_pause, self._is_saving = now, self._training.saver.is_busy
        return self._ask_all(self._is_last_moment() or self._saving.is_set())

    def begin_save(self, save: Callable[..., None], *, is_urgent: bool) -> None:
        """Begin a save. All saves are urgent until one has shown how long an urgent save takes.

        Args:
            save: called with ``is_urgent``, with ``then``, the function to call once the checkpoint is durable, and
                with ``slow_s``, the seconds by which the save before has slowed the steps beside it.
            is_urgent: see `checkpoint.Saver.begin`.
        """
        self._saving.clear()
        is_urgent = is_urgent or not self._urgent.count

        def note(saved: Saved) -> None:
            self._saves.add(saved.save_s)
            if is_urgent:
                self._urgent.add(saved.save_s)
            self._report(saved)

        save(is_urgent=is_urgent, then=note, slow_s=self._slowing.take_s())
        self._last_pause = math.inf  # the time until the next call includes more than a step

    def _is_last_moment(self) -> bool:
        if math.isinf(self._stop_at):
            return False
        # An urgent save takes no longer than others, which have a lower priority, so all of them bound it, too.
        save_s = min(self._urgent.bound_s, self._saves.bound_s)
        # A save that is under way has to end first, so count two.
        saves_s = save_s * (2 if self._training.saver.is_busy else 1)
        return time.monotonic() >= self._stop_at - saves_s - self._steps.bound_s

    def _ask_all(self, answer: bool) -> bool:
        return any(self._training.gather(answer)) if self._several else answer

    def __iter__(self) -> Iterator[Order]:
        while (order := self._next()) is not None and not isinstance(order, End):
            yield order
        self.is_ended |= order is not None

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
