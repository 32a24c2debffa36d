"""Which machines may train a run, and which checkpoints of dead ranks a run may take. The extensions decide both.

A drain file refuses its machine, too.
"""

import contextlib
import time
from pathlib import Path

from holdfast.checkpoint import Saved
from holdfast.config import RunConfig
from holdfast.errors import MachineRefused
from holdfast.extending import call_all, call_each
from holdfast.journal import Commit, Journal
from holdfast.machine.preemption import read_drain_file


def check_machine(config: RunConfig) -> None:
    """Check that no extension refuses this machine.

    Raises:
        MachineRefused: an extension refuses it.
        HoldfastError: an extension refuses it with an error of its own.
    """
    for name, reason in call_all("admission", config):
        if reason:
            raise MachineRefused(
                f"the extension {name} refuses this machine: {reason}", hint="start the run on another machine"
            )


def check_drained(drain_file: str | None) -> None:
    """Check that the time that a drain file leaves this machine, from the file's last write on, isn't over.

    Otherwise each attempt on this machine would stop at once, and the next attempt would follow without end.

    Args:
        drain_file: the path; None for no file.

    Raises:
        MachineRefused: no time is left.
    """
    if drain_file is None:
        return
    path = Path(drain_file)
    with contextlib.suppress(OSError, ValueError):  # an attempt warns of a file that can't be read
        notice = read_drain_file(path)
        if notice is not None and time.time() - path.stat().st_mtime >= notice.within_s:
            raise MachineRefused(
                f"this machine is drained: {path} exists (resume.drain_file)",
                hint="delete this file when the machine may train again, or start the run on another machine",
            )


def ask_adoption(journal: Journal, head: Commit | None, attempt: int, saved: Saved) -> str:
    """Return why a checkpoint without a commit may not be adopted, or an empty text.

    No file of the checkpoint says which attempt's ranks have saved it. So any attempt since the parent's commit may
    have saved it.

    Args:
        head: the checkpoint's parent; None before the run's first commit.
        attempt: the present attempt's number.
    """
    attempts = range(journal.first_attempt_after(head), attempt + 1)
    return next(filter(None, call_each("adoption", journal, saved, attempts)), "")
