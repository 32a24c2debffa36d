"""Signals and the exit code of a rank that a launcher such as torchrun has started, instead of the attempt.

The rank passes the launcher's signals on to the attempt, and the attempt's exit code on to the launcher. For a rank
that the attempt has started these functions do nothing.
"""

import contextlib
import os
import signal

from holdfast.errors import RunStopped
from holdfast.machine import heartbeats
from holdfast.machine.processes import is_running

# The environment variable with the number of the pipe's file descriptor from which the attempt's exit code is read.
END_VARIABLE = "HOLDFAST_END"
# The environment variable with the attempt's process id. The attempt is a child process of the first rank of its
# machine.
BESIDE_VARIABLE = "HOLDFAST_BESIDE"
STOPPED_EARLY = RunStopped.exit_code
_told: list[int] = []  # the process ids of the attempts to which this rank has sent SIGTERM


def is_attached() -> bool:
    """Return whether a launcher such as torchrun has started this rank, instead of the attempt."""
    return END_VARIABLE in os.environ


def pass_on_stop() -> None:
    """Send SIGTERM to the attempt, because the launcher is ending the ranks.

    Only a machine's first rank sends it, and only once.

    A launcher also ends the remaining ranks if one rank has died. Then this function sends no signal, because the
    attempt itself notices the dead rank.
    """
    number = int(os.environ.get(BESIDE_VARIABLE, "0"))
    if number and not _told and all(is_running(beat.pid) for beat in heartbeats.read_beats().values()):
        _told.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGTERM)


def await_code(code: int) -> int:
    """Wait for the attempt to commit and end. Return the attempt's exit code, or ``code`` if the attempt sends none.

    Args:
        code: the rank's exit code; 0 if an order has ended the rank.
    """
    if not is_attached():
        return code
    # The launcher may end the remaining ranks as soon as one rank has ended.
    signal.signal(signal.SIGTERM, lambda *_: pass_on_stop())
    given = os.read(int(os.environ[END_VARIABLE]), 1)
    if number := int(os.environ.get(BESIDE_VARIABLE, "0")):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(number, 0)  # wait, so that no process of the run is left when the launcher sees the end
    return given[0] if given else code or STOPPED_EARLY
