"""Threads that give way to training."""

import contextlib
import os
import sys
import threading

# The highest number is the lowest priority: such a thread has what nobody else wants.
LOWEST_PRIORITY = 19


class Priority:
    """That of some threads: the lowest, until it is restored. Only on Linux has a thread one of its own."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._usual = os.getpriority(os.PRIO_PROCESS, 0)
        self._is_low = True
        self._lock = threading.Lock()

    def join(self) -> None:
        """The thread that calls this is one of them."""
        with self._lock:
            self._threads.append(threading.get_native_id())
            # One that begins has the priority of the one that began it, which may have been low then.
            self._set(self._threads[-1])

    def lower(self) -> None:
        """They have the lowest."""
        self._change(is_low=True)

    def restore(self) -> None:
        """They have the usual one, where this process may do that."""
        self._change(is_low=False)

    def _change(self, *, is_low: bool) -> None:
        with self._lock:
            if is_low != self._is_low:
                self._is_low = is_low
                for thread in self._threads:
                    self._set(thread)

    def _set(self, thread: int) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # it may not; or the thread has ended
                os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY if self._is_low else self._usual)
