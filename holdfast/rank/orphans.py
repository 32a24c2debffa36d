"""Orphans: ranks whose attempt has died.

An orphan finishes its step, saves and ends; see `holdfast.rank.orders`. It ends after `ENDS_WITHIN_S` at the latest,
even if the user's code hangs. A new attempt on the same machine first waits for the orphans of its run, because they
may hold a port or a lock that the user's code needs.
"""

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import stat
import threading
import time
from pathlib import Path

from holdfast.config import RunConfig
from holdfast.machine.processes import ATTEMPT_VARIABLE, is_rank, is_running, read_age
from holdfast.rank.process import CONFIG_VARIABLE

log = logging.getLogger(__name__)

# The seconds in which an orphan has to finish its step, to save and to end.
ENDS_WITHIN_S = 600.0
LOOK_EVERY_S = 0.1


def end_if_orphaned() -> None:
    """End this rank at the latest `ENDS_WITHIN_S` after its attempt has died. The log then has its stacks.

    The rank notices the attempt's death by the end of their pipe. Ranks that a launcher has started have no such pipe.
    """
    if ATTEMPT_VARIABLE in os.environ and stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    waiting = select.poll()
    waiting.register(0, 0)  # the end of the pipe is always reported
    waiting.poll()
    # This timer needs no interpreter lock, which code that hangs may hold.
    faulthandler.dump_traceback_later(ENDS_WITHIN_S, exit=True, file=2)


def end_orphans(config: RunConfig) -> None:
    """Wait until the run's orphans on this machine have saved and ended. After ``resume.stop_within_s``, kill them.

    Find nothing on systems other than Linux.
    """
    orphans = _find_orphans(config)
    if not orphans:
        return
    log.info("waiting until the ranks of an earlier attempt have saved and ended: process %s", _spell(orphans))
    deadline = time.monotonic() + config.resume.stop_within_s
    while left := [*filter(is_running, orphans)]:
        if time.monotonic() > deadline:
            log.warning("killed the ranks of an earlier attempt, which didn't end: process %s", _spell(left))
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(LOOK_EVERY_S)


def _spell(pids: list[int]) -> str:
    return ", ".join(map(str, pids))


def _find_orphans(config: RunConfig) -> list[int]:
    """Return the ids of the processes on this machine that are ranks of the run, and whose attempt has died."""
    own = _find_folder(Path("/proc/self/cwd"), config.store), config.run
    names = os.listdir("/proc") if Path("/proc/self/environ").exists() else []
    return [int(name) for name in names if name.isdecimal() and _is_orphan(int(name), own)]


def _is_orphan(pid: int, own: tuple[str, str]) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):  # the process has ended, or belongs to a different user
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(word.decode().split("=", 1) for word in words if word.startswith(b"HOLDFAST_"))
        if ATTEMPT_VARIABLE not in variables or not is_rank(pid):
            return False
        config, attempt = json.loads(variables[CONFIG_VARIABLE]), int(variables[ATTEMPT_VARIABLE])
        if own != (_find_folder(Path(f"/proc/{pid}/cwd"), config["store"]), config["run"]):
            return False
        # a process that is younger than the rank has got the attempt's number
        return not is_running(attempt) or read_age(attempt) < read_age(pid)
    return False


def _find_folder(beside: Path, store: str) -> str:
    """Return a store's URL, or its folder's path, which may be relative to a process's working directory."""
    return store if "://" in store else os.path.realpath(beside.resolve() / Path(store).expanduser())
