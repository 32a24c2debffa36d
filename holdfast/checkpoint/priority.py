"""Threads that give way to training."""

import contextlib
import os
import sys
import threading

# The highest number is the lowest priority: such a thread has what nobody else wants.
LOWEST_PRIORITY = 19


class Priority:
    """That of some threads. A thread has one of its own on Linux only; elsewhere nothing is done."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._is_low = True
        self._lock = threading.Lock()

    def lower(self) -> None:
        """The thread that calls this has the lowest, until it's restored."""
        with self._lock:
            self._threads.append(threading.get_native_id())
            # One that begins has the priority of the one that began it, which may have been low then.
            self._set(self._threads[-1], LOWEST_PRIORITY if self._is_low else self._usual)

    def restore(self) -> None:
        """They have the usual one again, where this process may do that."""
        with self._lock:
            self._is_low = False
            for thread in self._threads:
                self._set(thread, self._usual)

    @staticmethod
    def _set(thread: int, priority: int) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # it may not; or the thread has ended
                os.setpriority(os.PRIO_PROCESS, thread, priority)
