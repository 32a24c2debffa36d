"""What a rank is ordered to do, and when it has to stop."""

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

# The longest step and the longest save so far, times two, and a second for the commit: then a deadline is kept.
SAFETY = 2.0
MARGIN_S = 1.0


class Orders:
    """The orders for all ranks, in order. A stop, or a save, doesn't wait for its turn."""

    def __init__(self, run: Training, report: Callable[[Saved], None]) -> None:
        """
        Args:
            report: called with each checkpoint that is durable, in another thread.
        """
        self._training = run
        self._report = report
        self._several = run.accelerator.num_processes > 1
        self._queue: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._stop_at = math.inf  # of time.monotonic()
        self._saving = threading.Event()
        self._last_pause = math.inf
        self._step_s = self._save_s = 0.0  # the longest step, and the longest urgent save
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        if run.accelerator.is_main_process:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # Unbuffered: the lock of sys.stdin, held by this thread, would abort the interpreter when the rank ends.
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
        finally:
            self._stop()

    def _stop(self) -> None:
        self._stop_at = 0.0
        self._queue.put(None)

    def is_stopping(self) -> bool:
        """Whether to stop after this step; all ranks get the same answer."""
        return self._ask_all(self._is_last_moment())

    def is_pausing(self) -> bool:
        """Whether to save after this step, be it to stop; asked after each, and all ranks get the same answer.

        Raises:
            StoreError: what is being saved can't be.
        """
        self._training.saver.check()
        now = time.monotonic()
        self._step_s, self._last_pause = max(self._step_s, now - self._last_pause), now
        return self._ask_all(self._is_last_moment() or self._saving.is_set())

    def begin_save(self, save: Callable[..., None], *, is_urgent: bool) -> None:
        """Begin a save, which is given ``is_urgent`` and what it is to call when it is durable.

        Until one has told how long a save takes, they are urgent.
        """
        self._saving.clear()
        is_urgent = is_urgent or not self._save_s
        save(is_urgent=is_urgent, then=self._note_urgent if is_urgent else self._report)
        self._last_pause = math.inf  # what follows is no step

    def _note_urgent(self, saved: Saved) -> None:
        self._save_s = max(self._save_s, saved.save_s)
        self._report(saved)

    def _is_last_moment(self) -> bool:
        if math.isinf(self._stop_at):
            return False
        # Before the first save nobody knows how long one takes; one may be on its way still.
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
