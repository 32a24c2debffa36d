"""The verdict on a remote process, alive or lost, from its state, its heartbeats and the watcher's own clock.

==================  =========================================================  ================================
state               alive while                                                after the window
==================  =========================================================  ================================
``RUNNING``         a new heartbeat arrives within `LOST_AFTER_S`              lost: crashed (*vanished*)
``CANCELLING``      a new heartbeat arrives within `CANCELLED_AFTER_S`         lost: cancelled
``PENDING``         its worker starts it within `NOT_BEGUN_AFTER_S`            lost: crashed (*vanished*)
``PREPARING``       its cluster finds a machine within `NOT_PLACED_AFTER_S`    lost: crashed (*vanished*)
``SCHEDULED``       it waits for a worker, without a limit                     -
``PAUSED``          it waits for a person, without a limit                     -
``VANISHED``        its last heartbeat is at most `DOUBTED_FOR_S` old          ended
==================  =========================================================  ================================

A heartbeat is a change that the watcher sees: of the state, or of a value that the process renews every few seconds.
The watcher reads only its own monotonic clock and never compares the clocks of two machines. A false alarm costs only
time: the next attempt claims the run, and the attempt that seemed lost can't commit any more.

``VANISHED`` is the verdict of another watcher, an automation of the server. It may be wrong after the server itself was
away. A live process that finds this state sets it back to Running (`tasks.heartbeat`).
"""

import enum
import math
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from holdfast.machine.preemption import Notice

EVERY_VARIABLE = "HOLDFAST_HEARTBEAT_S"
USUAL_EVERY_S = 3.0
# The bounds of the seconds between two heartbeats. Above 5 s, `CANCELLED_AFTER_S` is longer than the default of
# `resume.stop_within_s`, 25 s: a cancelled `train` may then end before it finds that its attempt is dead.
SHORTEST_S, LONGEST_S = 1.0, 10.0


def read_seconds(variable: str, usual_s: float, shortest_s: float, longest_s: float, hint: str) -> float:
    """Return the seconds in an environment variable; the usual number if the variable is unset or empty.

    Raises:
        SystemExit: the text isn't a number in these bounds. SystemExit is used because modules read such a variable
            while they are imported, before any command can report an error.
    """
    text = os.environ.get(variable, "")
    try:
        seconds = float(text or usual_s)
    except ValueError:
        seconds = math.nan
    if not shortest_s <= seconds <= longest_s:
        sys.exit(
            f"error: {variable} is {text!r}, not a number of seconds from {shortest_s:g} to {longest_s:g}\n"
            f"hint: unset the variable: by default {hint} {usual_s:g} s"
        )
    return seconds


# Seconds between two heartbeats. With a longer interval, all windows below and the windows of the automations are
# longer, too.
EVERY_S = read_seconds(
    EVERY_VARIABLE, USUAL_EVERY_S, SHORTEST_S, LONGEST_S, hint="a flow run gives a sign of life every"
)
# In the time of ten heartbeats a flow run renews its label five times (`tasks.heartbeat`). Even a machine that is five
# times busier than usual renews it once.
LOST_AFTER_S = 10 * EVERY_S
# By default this is shorter than `resume.stop_within_s`, so that a cancelled `train` has time to find that its attempt
# was already dead.
CANCELLED_AFTER_S = 5 * EVERY_S
# The seconds that a worker has to start a process. A worker usually needs only a few seconds, but pulling a container
# image takes longer.
NOT_BEGUN_AFTER_S = 120.0
# A cluster takes minutes to add a machine with a GPU and to pull the image. If the cloud has no spot machine, the wait
# may take hours. Then the attempt counts as lost, and a new attempt begins to wait in its place.
NOT_PLACED_AFTER_S = 3600.0
# After a longer gap between two readings of the state, the window begins again, because the server or the watcher's
# machine was away.
LONGEST_GAP_S = max(10.0, 3 * EVERY_S)
# If the server says that a process has vanished, the process may still be alive if its last new heartbeat is at most
# this many seconds old. This limit is below the automation's own window, 10 s. So a watcher that has also seen no
# heartbeat needn't wait again.
DOUBTED_FOR_S = 3 * EVERY_S
# A live worker signals the process of a cancelled flow run within this many seconds. A dead worker never does.
SIGNALLED_WITHIN_S = 10.0

WINDOWS_S = {
    "RUNNING": LOST_AFTER_S,
    "CANCELLING": CANCELLED_AFTER_S,
    "PENDING": NOT_BEGUN_AFTER_S,
    "PREPARING": NOT_PLACED_AFTER_S,
}
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class ProcessVerdict(enum.Enum):
    """A watcher's verdict on a process."""

    ENDED = "its state is final"
    ALIVE = "it may be alive"
    LOST = "the flow run gave no sign of life for longer than the allowed time"


class ProcessWatch:
    """One watcher's memory of one process.

    Attributes:
        silent_s: seconds without a heartbeat, as of the last call of `judge`.
    """

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._seen: tuple[object, object] | None = None
        self._heard_at = self._marked_at = self._looked_at = -math.inf

    def judge(self, kind: str, state: object, mark: object, now: float) -> ProcessVerdict:
        """Return the verdict on a process from its current state and heartbeat.

        Args:
            kind: the state's kind, as in the table above.
            state: an id that distinguishes this state from other states of the same kind.
            mark: the value that the process renews at each heartbeat.
            now: the time on the watcher's monotonic clock, in seconds.
        """
        is_new_mark = self._seen is not None and mark != self._seen[1]
        is_back = now - self._looked_at > LONGEST_GAP_S
        if is_back or (state, mark) != self._seen:
            self._heard_at = now
        if is_new_mark or (is_back and self._seen is not None):
            self._marked_at = now
        self._seen, self._looked_at = (state, mark), now
        self.silent_s = now - self._heard_at
        if kind in FINAL or (kind == "VANISHED" and now - self._marked_at > DOUBTED_FOR_S):
            return ProcessVerdict.ENDED
        return ProcessVerdict.LOST if self.silent_s > WINDOWS_S.get(kind, math.inf) else ProcessVerdict.ALIVE


class _RequestedState(Protocol):
    """The part of a state that shows a person's request."""

    def is_paused(self) -> bool: ...
    def is_cancelling(self) -> bool: ...
    def is_cancelled(self) -> bool: ...


class Request:
    """A person's request to pause or cancel this process: a source of notices, which another thread polls.

    Attributes:
        state: the paused, cancelling or cancelled state that was found; None while there is none.
    """

    def __init__(self, read: Callable[[], Any], save_within_s: float) -> None:
        """
        Args:
            read: returns this process's state; None if there is no state, or if the server doesn't answer.
            save_within_s: the limit for the last save after the request, in seconds.
        """
        self.read = read
        self.state: Any = None
        self._save_within_s = save_within_s
        self._cancelling_since: float | None = None

    def judge(self, state: _RequestedState | None, now: float) -> Notice | None:
        """Return a notice if a person has paused this process, or cancelled it and no worker has signalled it in time.

        Args:
            state: the state that was just read.
            now: the time on the monotonic clock, in seconds.
        """
        if state is None or not (state.is_paused() or is_cancel(state)):
            self._cancelling_since = None
            return None
        if state.is_cancelling():
            self._cancelling_since = now if self._cancelling_since is None else self._cancelling_since
            if now - self._cancelling_since < SIGNALLED_WITHIN_S:
                return None  # the worker is about to signal this process
        self.state = state
        reason = f"a person has {'paused' if state.is_paused() else 'cancelled'} this attempt"
        return Notice(reason, self._save_within_s, is_at_once=True)


def is_cancel(state: _RequestedState | None) -> bool:
    """Return whether this state shows that a person is cancelling, or has cancelled, its process."""
    return state is not None and (state.is_cancelling() or state.is_cancelled())
