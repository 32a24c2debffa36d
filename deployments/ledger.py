"""The ledger of `make up`: its processes on this machine, by id and start time, so that `make down` ends only these."""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from holdfast.errors import ConfigError, RunStopped
from holdfast.store.modules import describe_modules
from tasks.credentials import STARTED, open_state, private, read_started
from tasks.processes import began_at, is_recorded_process

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN_S = 300.0
DOWN_WITHIN_S = 60.0


class ProcessLedger:
    """The record of started processes: ``started.json`` in the state folder, which also has the processes' output.

    Attributes:
        known: process id, start time and further facts of each process, by name.
        processes: the processes that the current process has started itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, dict[str, Any]] = read_started(folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def is_alive(self, name: str) -> bool:
        """Return whether the process that was started under this name is alive."""
        entry = self.known.get(name)
        return entry is not None and is_recorded_process(entry["pid"], entry["began"])

    def add(self, name: str, pid: int, **facts: Any) -> None:
        self.known[name] = {"pid": pid, "began": began_at(pid), **facts}
        self._write()

    def remove(self, name: str) -> None:
        self.known.pop(name, None)
        self._write()

    def _write(self) -> None:
        path = self.folder / STARTED
        temporary = path.with_suffix(".new")
        with open(temporary, "w", encoding="utf-8", opener=private) as writer:
            writer.write(json.dumps(self.known, indent=2) + "\n")
        temporary.replace(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the state folder for the block, so that no other `make up` or `make down` uses it.

    Raises:
        ConfigError: another `make up` or `make down` holds the lock.
    """
    with (folder / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another make up or make down is at work in {folder}", hint="wait until it has ended, then try again"
            ) from None
        yield


def check_owner(ledger: ProcessLedger) -> None:
    """Check that all live processes were started from this checkout, or from a checkout that no longer exists.

    Raises:
        ConfigError: one of the processes was started from another checkout.
    """
    for name, entry in ledger.known.items():
        checkout = entry.get("checkout", "")
        if checkout != str(ROOT) and ledger.is_alive(name) and Path(checkout or "/nowhere").is_dir():
            raise ConfigError(
                f"{name} is running already, started from the checkout {checkout}, not from {ROOT}",
                hint=f"make -C {shlex.quote(checkout)} down ends it; "
                "HOLDFAST_STATE=/another/folder make up starts servers and pools for this checkout alone",
            )


def check_current(ledger: ProcessLedger) -> None:
    """Check that all live processes run this checkout's code, with a server that requires the secret.

    Raises:
        ConfigError: the checkout was moved, or an earlier version of Holdfast started one of the processes.
    """
    for name, entry in ledger.known.items():
        checkout = entry.get("checkout", "")
        if ledger.is_alive(name) and checkout != str(ROOT):
            was = (
                f"from {checkout}, which is gone"
                if checkout
                else ("started by an earlier version, without authentication")
            )
            raise ConfigError(f"{name} is running already, started {was}", hint="run make down, then try again")


def own_temporary() -> str:
    """Return this user's own folder for temporary files; create it if it is missing.

    In the common temporary folder, the Prefect workers of all users would share one folder, which only the first of
    these users may write.
    """
    folder = Path(tempfile.gettempdir()) / f"holdfast-{os.geteuid()}"
    open_state(folder, "temporary folder", hint="TMPDIR=/another/folder before the command chooses its place")
    return str(folder)


def launch_process(
    ledger: ProcessLedger,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    user: Mapping[str, Any] | None = None,
    umask: int = -1,
    **facts: Any,
) -> None:
    """Start a process in a new session: it outlives the current process. Write its output to ``<name>.log``.

    Args:
        environment: variables to add to the current process's environment, or to replace in it.
        umask: the umask of the new process; by default the umask of the current process.
        user: arguments of `subprocess.Popen` that run the new process as another user.
        facts: further facts for the new process's record.
    """
    with open(ledger.folder / f"{name}.log", "ab", opener=private) as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **describe_modules(), **environment},
            cwd="/" if user else ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            umask=umask,
            preexec_fn=_reset_signals,
            **(user or {}),
        )
    ledger.processes.append(process)
    ledger.add(name, process.pid, checkout=str(ROOT), **facts)


def _reset_signals() -> None:
    # Restore SIGINT, because a shell's background process ignores it, and a worker that ignores SIGINT can't be ended.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def end_processes(ledger: ProcessLedger, names: Iterable[str]) -> list[str]:
    """End the processes that were started under these names, all at once. Return the names of those that were alive.

    A process that doesn't end by itself in time is killed.
    """
    names = list(names)
    alive = {name: int(ledger.known[name]["pid"]) for name in names if ledger.is_alive(name)}
    workers = {name: pid for name, pid in alive.items() if name.startswith("worker-")}
    tell_workers([*workers.values()])
    _signal([pid for name, pid in alive.items() if name not in workers], signal.SIGTERM)
    if not _await_gone(lambda: any(map(ledger.is_alive, alive))):
        for name in filter(ledger.is_alive, alive):
            os.killpg(alive[name], signal.SIGKILL)
        _await_gone(lambda: any(map(ledger.is_alive, alive)))  # a killed process keeps its port until it is gone
    for name in names:
        ledger.remove(name)
    return list(alive)


def tell_workers(workers: list[int]) -> None:
    """Send SIGTERM to the workers' flow runs, wait for their end, and then send SIGTERM to the workers.

    A worker that gets SIGTERM first would kill its flow runs before they have saved.
    """
    with _held(workers):
        flow_runs = [child for pid in workers for child in children_of(pid)]
        _signal(flow_runs, signal.SIGTERM)
        _await_gone(lambda: bool({child for pid in workers for child in children_of(pid)} & {*flow_runs}))
        _signal(workers, signal.SIGTERM)


@contextlib.contextmanager
def _held(workers: list[int]) -> Iterator[None]:
    """Suspend workers (SIGSTOP) for the block, so that they start no new flow run while their flow runs are ended."""
    _signal(workers, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(workers, signal.SIGCONT)


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's live children."""
    try:
        return [child.pid for child in psutil.Process(pid).children() if began_at(child.pid)]
    except psutil.NoSuchProcess:
        return []


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _await_gone(is_there: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DOWN_WITHIN_S
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_there()


def await_ready(what: str, is_ready: Callable[[], bool], ledger: ProcessLedger, name: str) -> None:
    """Wait until a process that was just started is ready.

    Raises:
        RunStopped: the process has ended, or was not ready in time.
    """
    deadline = time.monotonic() + READY_WITHIN_S
    log = ledger.folder / f"{name}.log"
    while not is_ready():
        if not ledger.is_alive(name):
            raise RunStopped(f"{what} has ended before it was ready", hint=f"{log} has its output")
        if time.monotonic() > deadline:
            raise RunStopped(
                f"{what} was not ready within {READY_WITHIN_S:.0f} s of its start", hint=f"{log} has its output"
            )
        time.sleep(0.1)
