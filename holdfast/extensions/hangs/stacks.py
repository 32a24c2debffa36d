"""The Python stacks of ranks: at a signal, each rank that still reacts writes its stack into the ranks' log."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.machine.heartbeats import STACKS_SIGNAL
from holdfast.machine.processes import STOPPED, read_process
from holdfast.rank.ending import find_user_line

ANSWERS_WITHIN_S = 3.0
SETTLED_S = 0.2


def write_stacks(log: Path, titles: Mapping[int, str]) -> dict[int, str]:
    """Make processes write their stacks into the log, one after the other, each below its title.

    Args:
        titles: the line to write above each process's stack, by process id.

    Returns:
        For each process, by process id, the line of the user's code that it executes, as ``file:line``. The line is
        empty if the stack has no such line, or if the process doesn't answer within `ANSWERS_WITHIN_S`.
    """
    found = {}
    for pid, title in titles.items():
        begins = _append(log, f"---- {title}\n")
        text = ""
        if read_process(pid)[0] != STOPPED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
            text = _read_settled(log, begins)
        if not text:
            _append(log, "the rank doesn't answer: its process is stopped, or inside the kernel\n")
        found[pid] = find_user_line(text.splitlines())
    return found


def _append(log: Path, text: str) -> int:
    """Append text to the log, and return the log's new size in bytes; 0 if the log can't be written."""
    with contextlib.suppress(OSError), log.open("ab") as file:
        file.write(text.encode())
        return file.tell()
    return 0


def _read_settled(log: Path, begins: int) -> str:
    """Wait until nothing has been added to the log for `SETTLED_S`.

    Return the log's text from the byte ``begins`` on.
    """
    deadline, size, settled_at = time.monotonic() + ANSWERS_WITHIN_S, begins, 0.0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if (now := log.stat().st_size) != size:
                size, settled_at = now, time.monotonic() + SETTLED_S
        if settled_at and time.monotonic() > settled_at:
            break
        time.sleep(SETTLED_S / 10)
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(begins)
        return file.read().decode(errors="replace")
    return ""
