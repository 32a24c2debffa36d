"""The orders of an attempt, read from standard input by a thread."""

import threading
from collections.abc import Callable


class OrderLines:
    """The lines of standard input, which are kept until `follow` sets the function that handles them.

    Attributes:
        has_ended: whether the input has ended, because the attempt doesn't need its ranks any more or has died.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._kept: list[str] = []
        self._obey: Callable[[str], None] = self._kept.append
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                self._pass_on(line.decode())
        self.has_ended = True
        self._pass_on("")

    def _pass_on(self, line: str) -> None:
        with self._lock:
            self._obey(line)

    def follow(self, obey: Callable[[str], None]) -> None:
        """Call a function with each line, the kept lines first, and with an empty line at the end of the input."""
        with self._lock:
            for line in self._kept:
                obey(line)
            self._obey = obey
