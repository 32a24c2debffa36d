"""The priority of background threads, which is lowered so that training gets the processor first.

Measured gain: when other processes use the cores, as Prefect's do after a chunk, a save delays the next step by 0.04 s
instead of 0.3 s. On an otherwise idle machine low priority saves nothing: a step's threads wait for each other, so time
taken from one core delays all of them. ``HOLDFAST_WITHOUT=priority`` turns the lower priority off.
"""

import contextlib
import os
import sys
import threading

from holdfast.memory.switches import is_on

# The highest nice value is the lowest priority: such a thread runs when no other thread wants the core.
LOWEST_PRIORITY = 19


class Priority:
    """The common priority of several threads. It has an effect only on Linux, where threads have priorities."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._is_low = True
        self._lock = threading.Lock()

    def lower(self) -> None:
        """Give the calling thread the lowest priority; if `restore` was called before, the usual priority."""
        with self._lock:
            self._threads.append(threading.get_native_id())
            # After `restore`, set the usual priority explicitly: a thread inherits the priority of the thread that
            # started it, which may be low.
            self._set(self._threads[-1], LOWEST_PRIORITY if self._is_low else self._usual)

    def restore(self) -> None:
        """Give the threads their usual priority again, if this process has the right to raise a priority."""
        with self._lock:
            self._is_low = False
            for thread in self._threads:
                self._set(thread, self._usual)

    @staticmethod
    def _set(thread: int, priority: int) -> None:
        if sys.platform == "linux" and is_on("priority"):
            with contextlib.suppress(OSError):  # the process lacks the right, or the thread has ended
                os.setpriority(os.PRIO_PROCESS, thread, priority)
