"""The queue of a rank's orders, and the decision when a rank has to save or stop."""

import enum
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from holdfast.checkpoint import Saved
from holdfast.ledger.durations import Durations, Slowing
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Phase, Place
from holdfast.rank import launcher_signals
from holdfast.rank.agreement import Agreement, Wish
from holdfast.rank.messages import End, Order, Save, Stop, decode_order
from holdfast.terminal.interrupt import take_like_sigterm
from holdfast.training import SaveRequest, Training, begin_save, objects

# If the ranks stop as soon as they can, a loop's code at an epoch's end still runs if it is expected to take at most so
# many seconds.
BRIEF_S = 1.0


class Stopwatch(Durations):
    """The durations of work whose beginning and end are noted."""

    _began = math.inf

    def begin(self) -> None:
        """Note that the work begins now."""
        self._began = time.monotonic()

    def stop(self) -> None:
        """Add the time since `begin`. Do nothing if the work hasn't begun."""
        if not math.isinf(self._began):
            self.add(time.monotonic() - self._began)
        self._began = math.inf


class SaveFailed(enum.Enum):
    """A marker in the queue of orders: the save in progress has failed."""

    MARK = enum.auto()


class Orders:
    """The orders for all ranks, as an iterator. A `Save` or a `Stop` isn't queued: it takes effect at the next step.

    The iteration ends after an `End`, at a `Stop` without a deadline, on SIGTERM, when standard input ends, and at a
    line that is not an order; see `check`.
    """

    def __init__(self, training: Training, report: Callable[[Saved], None]) -> None:
        """
        Args:
            report: a function that is called in another thread with each checkpoint, once the checkpoint is durable.
        """
        self._training = training
        self._report = report
        self._agreement = Agreement() if training.accelerator.num_processes > 1 else None
        self._agreed = Wish.NOTHING
        self._queue: queue.SimpleQueue[Order | SaveFailed | None] = queue.SimpleQueue()
        self._failure: Exception | None = None  # the error in the thread that reads orders
        self.is_ended = False  # whether the attempt, not a signal or another node, ended the ranks
        self._is_dismissed = False  # whether the attempt needs nothing more from these ranks
        self.is_orphaned = False  # whether the attempt's process has ended before it ended the ranks
        self._stop_at = math.inf  # when to stop, on the clock of time.monotonic()
        self._told_at = math.inf  # when the rank was told to stop at once, on the same clock
        self._saving = threading.Event()
        self._last_pause = math.inf
        self._step_s = 0.0  # the duration of the last measured step
        self._steps, self._urgent, self._saves = Durations(unknown_s=0.0), Durations(), Durations()
        self._ends = Stopwatch()  # measures the loop's code at the ends of epochs
        self._slowing = Slowing()
        self._is_saving = False  # whether a save was in progress when the present step began
        signal.signal(signal.SIGTERM, self._obey_signal)
        # A scheduler may send different signals than SIGTERM to every process of a job. STACKS_SIGNAL is excluded,
        # because it makes faulthandler write the stacks of a rank that hangs.
        take_like_sigterm(self._obey_signal, but=heartbeats.STACKS_SIGNAL)
        # Ctrl-C reaches ranks that a launcher such as torchrun has started. scancel --signal=INT reaches every process
        # of a job.
        signal.signal(signal.SIGINT, self._obey_signal)
        # The first rank of another node gets no orders, but the end of its input tells it that its node has to stop.
        if training.accelerator.is_local_main_process:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # Don't read sys.stdin: this thread would hold its lock, and Python aborts at exit if it can't acquire that
        # lock.
        order: Order | None = None
        try:
            with open(0, "rb", buffering=0, closefd=False) as lines:
                for line in lines:
                    order = decode_order(line)
                    if isinstance(order, Save):
                        self._saving.set()
                    elif not isinstance(order, Stop):
                        self._is_dismissed = isinstance(order, End)
                        self._queue.put(order)
                    elif order.within_s is None:
                        break
                    else:
                        self.is_ended = True
                        self._stop_at = min(self._stop_at, time.monotonic() + order.within_s)
                else:
                    self.is_orphaned = not self._is_dismissed
        except Exception as error:
            self._failure = error
        finally:
            self.is_ended = True
            self._stop()

    def _obey_signal(self, number: int, frame: object) -> None:
        launcher_signals.pass_on_stop()
        self._stop()

    def _stop(self) -> None:
        self._stop_at = 0.0
        self._told_at = min(self._told_at, time.monotonic())
        self._queue.put(None)

    def is_stopping(self) -> bool:
        """Return whether to stop training. Call it at a pause, or after the last step.

        All ranks get the same answer.
        """
        self._ends.stop()
        if self._agreed is not Wish.STOP and (self._agreement is None or self._agreed is Wish.NOTHING):
            self._agreed = self._ask_all()
        agreed, self._agreed = self._agreed, Wish.NOTHING
        return agreed is Wish.STOP

    def has_time(self, within_s: float) -> bool:
        """Return whether a further step probably ends before the machine is taken away.

        Args:
            within_s: the time limit after an order to stop at once. No scheduler tells how much time it leaves.
        """
        deadline = self._told_at + within_s if math.isfinite(self._told_at) else self._stop_at
        return not self._is_dismissed and time.monotonic() + self._steps.bound_s < deadline

    def is_pausing(self) -> bool:
        """Return whether to pause training here, to save or to stop. All ranks get the same answer.

        With several ranks the answer may be delayed by one call; see `Agreement`. Call this between all steps, because
        the time between two calls is the measured length of a step.

        Raises:
            StoreError: the save in progress has failed.
        """
        self._training.saver.check()
        self._ends.stop()
        now = time.monotonic()
        if now > self._last_pause:
            self._step_s = now - self._last_pause
            self._steps.add(self._step_s)
            self._slowing.add(now - self._last_pause, is_beside=self._is_saving)
        self._last_pause, self._is_saving = now, self._training.saver.is_busy
        if self._agreed is not Wish.STOP:
            self._agreed = max(self._ask_all(), self._agreed)
        return self._agreed > Wish.NOTHING

    def is_stopping_early(self) -> bool:
        """Return whether to stop before a loop's code at an epoch's end, because that code might take too long.

        Call it after the epoch's last step, before that code. All ranks get the same answer.
        """
        self._ends.begin()
        left_s = max(self._stop_at - time.monotonic() - self._saves_s, BRIEF_S)
        is_short = not math.isinf(self._stop_at) and self._ends.bound_s > left_s
        wish = Wish.STOP if is_short else Wish.NOTHING
        agreed = self._exchange(self._agreement, wish) if self._agreement else wish
        self._agreed = max(self._agreed, agreed)
        return self._agreed is Wish.STOP

    @property
    def has_deadline(self) -> bool:
        """Return whether this rank was told to save and end, now or in time."""
        return not math.isinf(self._stop_at)

    def note_wait(self) -> None:
        """Exclude the wait before the next step from the measured length of steps."""
        self._last_pause = math.inf

    def begin_save(self, request: SaveRequest) -> None:
        """Begin a save. All saves are urgent until the first has shown how long an urgent save takes."""
        self._saving.clear()
        is_urgent = request.is_urgent or not self._urgent.count

        def note(saved: Saved | None) -> None:
            assert saved is not None  # only a save for a rehearsal may be left out
            self._saves.add(saved.save_s)
            if is_urgent:
                self._urgent.add(saved.save_s)
            self._report(saved)

        begin_save(self._training, replace(request, is_urgent=is_urgent, slow_s=self._slowing.take_s()), note)
        # After a run's last chunk no step follows that would notice a failed save. So a failed save puts a marker into
        # the queue, which ends the wait for an order.
        self._training.saver.on_failure(lambda: self._queue.put(SaveFailed.MARK))
        # don't measure the next step, because the time until the next call includes the save
        self._last_pause = math.inf

    def _is_last_moment(self) -> bool:
        if math.isinf(self._stop_at):
            return False
        steps = 1 + (self._agreement.steps_late if self._agreement else 0)
        return time.monotonic() >= self._stop_at - self._saves_s - steps * self._steps.bound_s

    @property
    def _saves_s(self) -> float:
        """Return the seconds to reserve for a save before a stop."""
        # Saves that aren't urgent have a lower priority and take at least as long, so their bound holds for an urgent
        # save, too.
        save_s = min(self._urgent.bound_s, self._saves.bound_s)
        # A save in progress has to end first, so there has to be time for two saves.
        return save_s * (2 if self._training.saver.is_busy else 1)

    def _ask_all(self) -> Wish:
        wish = Wish.STOP if self._is_last_moment() else Wish.SAVE if self._saving.is_set() else Wish.NOTHING
        if self._agreement is None:
            return wish
        self._saving.clear()  # forget the wish, so that it is sent only once
        return self._exchange(self._agreement, wish)

    def _exchange(self, agreement: Agreement, wish: Wish) -> Wish:
        heartbeats.mark(Place.SYNCING)
        return agreement.exchange(wish, max(self._step_s, time.monotonic() - self._last_pause))

    def __iter__(self) -> Iterator[Order]:
        while (order := self._next()) is not None:
            self.is_ended |= isinstance(order, End)
            yield order
            if isinstance(order, End):
                break

    def _next(self) -> Order | None:
        heartbeats.begin(Phase.WAITING)
        order = self._get() if self._training.accelerator.is_main_process else None
        return order if self._agreement is None else objects.broadcast(order)

    def _get(self) -> Order | None:
        """Return the next order; None if no more orders come.

        Raises:
            StoreError: the save in progress has failed.
        """
        while (order := self._queue.get()) is SaveFailed.MARK:
            self._training.saver.check()
        return order

    def check(self) -> None:
        """Raise the error that ended the iteration over orders, if an error ended it.

        Raises:
            RunStopped: a line of standard input was no order.
        """
        if self._failure is not None:
            raise self._failure
