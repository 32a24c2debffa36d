"""Threads that give way to training.

Measured gain: beside other processes that want the cores, as Prefect's do after a chunk, a save holds up the next step
by 0.04 s instead of 0.3 s. On an otherwise idle machine there is none: a step's threads wait for each other, so time
taken from one core delays all of them. ``HOLDFAST_WITHOUT=priority`` turns it off.
"""

import contextlib
import os
import sys
import threading

from holdfast.memory.switches import is_on

# The highest number is the lowest priority: such a thread has what nobody else wants.
LOWEST_PRIORITY = 19


class Priority:
    """The priority of some threads. Threads have their own on Linux only; elsewhere this does nothing."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._is_low = True
        self._lock = threading.Lock()

    def lower(self) -> None:
        """Give the calling thread the lowest priority, until `restore`."""
        with self._lock:
            self._threads.append(threading.get_native_id())
            # One that begins has the priority of the one that began it, which may have been low then.
            self._set(self._threads[-1], LOWEST_PRIORITY if self._is_low else self._usual)

    def restore(self) -> None:
        """Give the threads their usual priority again, where this process may do that."""
        with self._lock:
            self._is_low = False
            for thread in self._threads:
                self._set(thread, self._usual)

    @staticmethod
    def _set(thread: int, priority: int) -> None:
        if sys.platform == "linux" and is_on("priority"):
            with contextlib.suppress(OSError):  # it may not; or the thread has ended
                os.setpriority(os.PRIO_PROCESS, thread, priority)
