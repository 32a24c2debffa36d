"""The ledger of `make up`: its processes on this machine, by id and start time, so that `make down` ends no others."""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, RunStopped
from tasks.credentials import STARTED, read_started

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN_S = 300.0
DOWN_WITHIN_S = 60.0


class Ledger:
    """The record of started processes: ``started.json`` in the state folder, beside their output.

    Attributes:
        known: process id, start time and further facts of each process, by name.
        processes: the processes that this process has started itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, dict[str, Any]] = read_started(folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def is_alive(self, name: str) -> bool:
        """Return whether the process that was started under this name lives."""
        entry = self.known.get(name)
        return entry is not None and entry["began"] != "" and began_at(entry["pid"]) == entry["began"]

    def add(self, name: str, pid: int, **facts: Any) -> None:
        self.known[name] = {"pid": pid, "began": began_at(pid), **facts}
        self._write()

    def remove(self, name: str) -> None:
        self.known.pop(name, None)
        self._write()

    def _write(self) -> None:
        path = self.folder / STARTED
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self.known, indent=2) + "\n", "utf-8")
        temporary.replace(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the state folder against every other `make up` and `make down` while the block lasts.

    Raises:
        ConfigError: another one holds the lock.
    """
    with (folder / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another make up or make down is at work in {folder}", hint="wait until it has ended, then try again"
            ) from None
        yield


def check_owner(ledger: Ledger) -> None:
    """Check that all live processes were started from this checkout, or from one that is gone.

    Raises:
        ConfigError: another checkout has started one.
    """
    for name, entry in ledger.known.items():
        checkout = entry.get("checkout", "")
        if checkout != str(ROOT) and ledger.is_alive(name) and Path(checkout or "/nowhere").is_dir():
            raise ConfigError(
                f"{name} is up already, started from {checkout}, not from {ROOT}",
                hint=f"make -C {shlex.quote(checkout)} down ends it; "
                "HOLDFAST_STATE=/another/folder make up starts servers and pools for this checkout alone",
            )


def check_current(ledger: Ledger) -> None:
    """Check that all live processes run this checkout's code, with a server that requires the secret.

    Raises:
        ConfigError: the checkout was moved, or an earlier version has started one.
    """
    for name, entry in ledger.known.items():
        checkout = entry.get("checkout", "")
        if ledger.is_alive(name) and checkout != str(ROOT):
            was = f"from {checkout}, which is gone" if checkout else "by an earlier version, without authentication"
            raise ConfigError(f"{name} is up already, started {was}", hint="make down, then try again")


def began_at(pid: int) -> str:
    """Return the time at which a process began; empty if there is no such process, or if it is a zombie."""
    shown = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        # Fix locale and time zone, which change this text, because another shell may compare it later.
        env=os.environ | {"LC_ALL": "C", "TZ": "UTC0"},
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    stat, _, began = shown.stdout.strip().partition(" ")
    return "" if stat.startswith("Z") else began.strip()


def start(
    ledger: Ledger,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    user: Mapping[str, Any] | None = None,
    **facts: Any,
) -> None:
    """Start a process in a session of its own, so that it outlives this one. Write its output to ``<name>.log``.

    Args:
        environment: variables to add to this process's environment, or to replace in it.
        user: arguments of `subprocess.Popen` that run it as another user.
        facts: further facts for its record.
    """
    with (ledger.folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            cwd="/" if user else ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_reset_signals,
            **(user or {}),
        )
    ledger.processes.append(process)
    ledger.add(name, process.pid, checkout=str(ROOT), **facts)


def _reset_signals() -> None:
    # A shell's background process ignores SIGINT, and a worker that ignores SIGINT can't be ended.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def end(ledger: Ledger, name: str) -> bool:
    """End the process that was started under this name. Return whether it was alive.

    Send SIGTERM to a worker's flow runs first, so that they save: the worker itself would kill them.
    """
    was_alive = ledger.is_alive(name)
    if was_alive:
        pid = ledger.known[name]["pid"]
        if name.startswith("worker-"):
            flow_runs = children_of(pid)
            _signal(flow_runs, signal.SIGTERM)
            _await_gone(lambda: bool(set(children_of(pid)) & set(flow_runs)))
        _signal([pid], signal.SIGTERM)
        if not _await_gone(lambda: ledger.is_alive(name)):
            os.killpg(pid, signal.SIGKILL)
            _await_gone(lambda: ledger.is_alive(name))  # a killed process lives on for a moment, with its port
    ledger.remove(name)
    return was_alive


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's live children."""
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, encoding="utf-8", check=True)
    rows = [line.split() for line in shown.stdout.splitlines()]
    return [int(child) for child, parent, stat in rows if int(parent) == pid and not stat.startswith("Z")]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _await_gone(is_there: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DOWN_WITHIN_S
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_there()


def await_ready(what: str, is_ready: Callable[[], bool], ledger: Ledger, name: str) -> None:
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
            raise RunStopped(f"{what} did not start within {READY_WITHIN_S:.0f} s", hint=f"{log} has its output")
        time.sleep(0.1)
