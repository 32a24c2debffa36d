"""The temporary Prefect server outlives its command for some minutes, so that the next command finds a started server.

Starting a server takes seconds of CPU time, which the ranks of a restarted run need. A file that only its user can read
has the server's address and secret. Each command holds a shared lock on a second file while it uses the server, also
if the command is killed; a server without a command tries to take the exclusive lock, and ends once it has been unused
for long enough.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import prefect
from prefect.settings import get_current_settings

from holdfast import __version__
from tasks.credentials import private
from tasks.liveness import read_seconds
from tasks.processes import began_at, is_recorded_process

VARIABLE = "HOLDFAST_SERVER_LINGERS_S"
DEFAULT_S, LONGEST_S = 180.0, 86400.0
RECORD, LOCK = "holdfast-server.json", "holdfast-server.lock"
# A server holds the exclusive lock for less than a millisecond.
LOCKED_WITHIN_S = 2.0


@dataclass(frozen=True)
class ServerRecord:
    """A server that a command has started, as the next commands have to know it.

    Args:
        began: see `tasks.processes.began_at`. A living process keeps its port, so no other program can have the port.
        made_with: see `digest_settings`.
    """

    url: str
    auth: str
    pid: int
    began: str
    made_with: str


def read_patience() -> float:
    """Return the seconds for which an unused server lives on; 0 if it ends with its command.

    Raises:
        SystemExit: the variable isn't a number of seconds.
    """
    return read_seconds(VARIABLE, DEFAULT_S, 0.0, LONGEST_S, hint="an unused server ends after")


def digest_settings() -> str:
    """Return the digest of everything that makes a server: programs, versions and Prefect's settings."""
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    made_with = [sys.prefix, __file__, __version__, prefect.__version__, sorted(settings.items())]
    return hashlib.sha256(json.dumps(made_with).encode()).hexdigest()


class SharedServer:
    """The record of the server in a folder of Prefect's, for a command that holds the shared lock."""

    def __init__(self, home: Path) -> None:
        self._file = home / RECORD

    def find(self) -> ServerRecord | None:
        """Return the recorded server if it lives, and if this user started it with the same settings."""
        record = read_server(self._file)
        if record and record.made_with == digest_settings() and is_recorded_process(record.pid, record.began):
            return record
        return None

    def record(self, pid: int, url: str, auth: str) -> None:
        """Record a server that this process has started."""
        record = ServerRecord(url, auth, pid, began_at(pid), digest_settings())
        written = self._file.with_name(f"{RECORD}.{os.getpid()}")
        with open(written, "w", encoding="utf-8", opener=private) as file:
            json.dump(asdict(record), file)
        written.replace(self._file)


@contextlib.contextmanager
def shared_server(home: Path) -> Iterator[SharedServer | None]:
    """Hold the shared lock inside the block. Yield None if servers don't outlive their commands, or without locks."""
    with contextlib.ExitStack() as stack:
        shared = None
        if read_patience():
            with contextlib.suppress(OSError):  # the file system has no locks
                stack.enter_context(_locked(home, fcntl.LOCK_SH, LOCKED_WITHIN_S))
                shared = SharedServer(home)
        yield shared


def read_server(file: Path) -> ServerRecord | None:
    """Return a recorded server; None for a file that is missing, damaged, or open to other users."""
    try:
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return None
        return ServerRecord(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def await_unused(home: Path) -> None:
    """In a server whose command has ended: wait until no command has used the server for long enough.

    Return at once if a newer server is on record, or none.
    """
    patience_s, last_used = read_patience(), time.monotonic()
    while patience_s:
        time.sleep(min(1.0, patience_s / 4))
        record = read_server(home / RECORD)
        if record is None or record.pid != os.getpid():
            return
        try:
            with _locked(home, fcntl.LOCK_EX):
                if time.monotonic() - last_used >= patience_s:
                    (home / RECORD).unlink()
                    return
        except BlockingIOError:
            last_used = time.monotonic()
        except OSError:
            return


@contextlib.contextmanager
def _locked(home: Path, kind: int, within_s: float = 0.0) -> Iterator[None]:
    """Hold a lock; the kernel releases it if this process is killed.

    Raises:
        BlockingIOError: another process holds a lock that excludes this one.
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + within_s
    with (home / LOCK).open("wb") as file:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.01)
        yield
