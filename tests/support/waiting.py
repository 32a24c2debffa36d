"""Wait for what another thread or process does."""

import time
from collections.abc import Callable

# Only a hanging program takes longer: beside twenty busy processes a second of work takes half a minute.
WITHIN_S = 300.0


def await_equal(found: Callable[[], object], expected: object) -> None:
    """Call `found` until it returns what is expected."""
    deadline = time.monotonic() + WITHIN_S
    while found() != expected:
        assert time.monotonic() < deadline, found()
        time.sleep(0.01)
