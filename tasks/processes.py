"""A process by its id and its start, so that a later process with the same id isn't mistaken for it."""

import calendar
import time
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Two readings of the same start time may differ by this many seconds, because the kernel and ps round the boot time to
# a second.
ROUNDED_BY_S = 1.5
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def began_at(pid: int) -> str:
    """Return when a process began: the id of this machine's boot, and the seconds from the boot to the start.

    Unlike a clock time, this value doesn't change if somebody sets the clock. It is empty if there is no such process,
    or if the process is a zombie.
    """
    try:
        process = psutil.Process(pid)
        if has_ended(process):
            return ""
        return f"{_read_boot_id()} {process.create_time() - psutil.boot_time():.2f}"
    except psutil.NoSuchProcess:
        return ""


def is_recorded_process(pid: int, began: str) -> bool:
    """Return whether the process with this id is alive and is the recorded process.

    Return False for an unreadable record, so that no process is ended by mistake.

    Args:
        began: the process's start as `began_at` returned it, or as an earlier version recorded it: the text of
            ``ps -o lstart`` in UTC.
    """
    found = began_at(pid)
    if not found or not began:
        return False
    boot_id, _, since_boot = found.rpartition(" ")
    recorded_id, _, recorded = began.rpartition(" ")
    try:
        if recorded_id == boot_id:
            return abs(float(recorded) - float(since_boot)) < ROUNDED_BY_S
        booted_at = float(psutil.boot_time())
        return abs(calendar.timegm(time.strptime(began)) - booted_at - float(since_boot)) < ROUNDED_BY_S
    except ValueError:
        return False


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not yet waited for it (a zombie).

    A killed process is a zombie as soon as its main thread has ended. Until its other threads end, it keeps its ports.

    Raises:
        psutil.NoSuchProcess: the process is gone.
    """
    return process.status() in DEAD and process.num_threads() <= 1


def _read_boot_id() -> str:
    """Return the id of this machine's boot; a dash on a system without such ids."""
    try:
        return BOOT_ID.read_text("utf-8").strip()
    except OSError:
        return "-"
