"""The wait of ranks that were started ahead: they have imported torch, and use no device before their first order.

The first order ends the wait, and the ranks build the recipe. All ranks of a machine share one standard input, and no
rank reads from it during the wait.
"""

import os
import select
import sys

# The environment variable that is set for ranks which wait for their first order before they build the recipe.
HELD_VARIABLE = "HOLDFAST_HELD"


def wait_to_proceed() -> None:
    """Wait until an order arrives. Return at once if `HELD_VARIABLE` isn't set.

    Raises:
        SystemExit: the attempt has closed the pipe without an order, so the rank isn't needed.
    """
    if os.environ.get(HELD_VARIABLE):
        waiting = select.poll()
        waiting.register(0, select.POLLIN | select.POLLHUP)
        if not waiting.poll()[0][1] & select.POLLIN:
            sys.exit(0)
