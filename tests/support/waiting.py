"""Wait for what another thread or process does."""

import time
from collections.abc import Callable


def await_equal(found: Callable[[], object], expected: object) -> None:
    """Call `found` until it returns what is expected, for a minute at most."""
    deadline = time.monotonic() + 60  # a disk that others use may stand still for a while
    while found() != expected:
        assert time.monotonic() < deadline, found()
        time.sleep(0.01)
