"""Ctrl-C, remembered."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def remembered_interrupt() -> Iterator[Callable[[], None]]:
    """In the block, Ctrl-C raises KeyboardInterrupt wherever the program is, as always, and is remembered.

    Yields:
        A check that raises it again: the code that it broke into, a library's perhaps, may have swallowed it.
    """
    count = 0

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        signal.default_int_handler(signum, frame)

    def check() -> None:
        if count:
            raise KeyboardInterrupt

    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield check
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
