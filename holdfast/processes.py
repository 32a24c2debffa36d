"""The processes of an attempt's ranks, and what their environment tells them and us."""

import contextlib
import os
from pathlib import Path

# Every process of one attempt's ranks has this variable in its environment, with a value that no other has.
MARK_VARIABLE = "HOLDFAST_RANKS"
# The steps to which an epoch is cut, for a proof; 0 for no cut.
LONGEST_EPOCH_VARIABLE = "HOLDFAST_LONGEST_EPOCH"
RANK_MODULE = "holdfast.rank"


def find_processes(mark: str) -> list[int]:
    """Return the ids of the processes of the ranks that have this mark: torchrun, ranks, forked loader workers.

    Other programs that a recipe has started have the mark, too, but not the command line. Linux only.
    """
    names = os.listdir("/proc") if Path("/proc/self/environ").exists() else []
    return [int(name) for name in names if name.isdecimal() and _has_mark(Path("/proc", name), mark)]


def _has_mark(process: Path, mark: str) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        variables, command = ((process / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
        return f"{MARK_VARIABLE}={mark}".encode() in variables and RANK_MODULE.encode() in command
    return False


def leads_session(pid: int) -> bool:
    """Return whether the process is a rank or torchrun, not a loader worker, which ends after its rank by itself."""
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False
