"""A rank of another launcher at its end: it tells the attempt what the launcher wants, and the launcher what the
attempt has done. For any other rank these functions do nothing.
"""

import contextlib
import os
import signal

from holdfast.errors import RunStopped
from holdfast.machine import heartbeats
from holdfast.machine.processes import is_running

# The file number of the pipe with the attempt's exit code.
END_VARIABLE = "HOLDFAST_END"
# The process of the attempt, which is a child of the first rank of its machine.
BESIDE_VARIABLE = "HOLDFAST_BESIDE"
STOPPED_EARLY = RunStopped.exit_code
_told: list[int] = []  # the attempts that a signal was passed on to


def is_attached() -> bool:
    """Return whether another launcher has started this rank."""
    return END_VARIABLE in os.environ


def pass_on_stop() -> None:
    """Tell the attempt that the launcher ends its ranks, once, if this is the first rank of a machine.

    A launcher also ends the ranks that are left when one has died. The attempt then finds the dead one by itself.
    """
    number = int(os.environ.get(BESIDE_VARIABLE, "0"))
    if number and not _told and all(is_running(beat.pid) for beat in heartbeats.read_beats().values()):
        _told.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGTERM)


def await_code(code: int) -> int:
    """Wait for the attempt to commit and end. Return its exit code, or this rank's own if it has none.

    Args:
        code: the rank's exit code; 0 if it ended by an order.
    """
    if not is_attached():
        return code
    # The launcher may end the ranks that are left as soon as the first one has ended.
    signal.signal(signal.SIGTERM, lambda *_: pass_on_stop())
    given = os.read(int(os.environ[END_VARIABLE]), 1)
    if number := int(os.environ.get(BESIDE_VARIABLE, "0")):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(number, 0)  # so that nothing of the run is left when the launcher sees the end
    return given[0] if given else code or STOPPED_EARLY
