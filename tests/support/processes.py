"""Look at processes of this machine that may begin, end or belong to another user meanwhile.

A process has its parent's command line and variables between fork and exec, for a moment none, and none as a zombie.
psutil raises for a zombie and for another user's process. No other file of the tests asks psutil for them
(tests/project/test_processes.py).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from holdfast import AttemptView

Read = TypeVar("Read", list[str], dict[str, str])

STARTS_WITHIN_S = 5.0  # a kernel thread never has a command line


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has none or has ended."""
    return _read_begun(process, process.cmdline, [])


def variables_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it can't be read."""
    return _read_begun(process, process.environ, {})


def log_of(pid: int) -> str:
    """Return the file of a rank's standard error. A forked rank has no environment by which to know it."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    return ""


def kill_ranks(attempt: AttemptView) -> None:
    """Kill all ranks of an attempt."""
    for beat in attempt.read_beats().values():
        os.kill(beat.pid, signal.SIGKILL)


def _read_begun(process: psutil.Process, read: Callable[[], Read], missing: Read) -> Read:
    """Return what psutil reads of a process once it has begun."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        while not (found := read()) and process.status() != psutil.STATUS_ZOMBIE:
            if time.time() - process.create_time() > STARTS_WITHIN_S:
                break
            time.sleep(0.001)
        return found
    return missing
