"""A process that stops itself (SIGSTOP) just before a write or a deletion, as if it slept there, until it is woken.

``python -m tests.support.stalled STORE WORK ARGUMENTS STOP...``: WORK is a function of this module and ARGUMENTS its
keywords, as JSON. A STOP, such as ``"create commits/"``, is a method of `LocalStore` and the beginning of the name that
the method is called with. The process stops at each of them once.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.config import Retention
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.keeping.retention import DEBRIS_AFTER_S, prune_by_policy
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from tests.support.makers import STEPS_PER_EPOCH, make_line, train

ROOT = Path(__file__).parents[2]


class Sleeper:
    """The process while it sleeps, and after it was woken."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.await_sleep()

    def await_sleep(self) -> None:
        """Wait until it sleeps."""
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._process.returncode = os.waitstatus_to_exitcode(status)
            raise AssertionError(f"it never slept: {self._process.communicate()[0]}")

    def wake_until_next(self) -> None:
        """Let it go on until it sleeps again."""
        self._process.send_signal(signal.SIGCONT)
        self.await_sleep()

    def wake(self) -> tuple[int, str]:
        """Let it go on; return its exit code and what it wrote, once it has ended."""
        self._process.send_signal(signal.SIGCONT)
        out, _ = self._process.communicate()
        return self._process.returncode, out


@contextlib.contextmanager
def stalled(store: Path, work: str, *stops: str, **arguments: Any) -> Iterator[Sleeper]:
    """Start the process, wait until it sleeps, and end it after the block."""
    command = [sys.executable, "-m", __name__, str(store), work, json.dumps(arguments), *stops]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield Sleeper(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def prune_once(store: str, debris_after_s: float = DEBRIS_AFTER_S, **policy: Any) -> None:
    """Prune the run once with a policy."""
    journal = Journal(open_store(store), "run")
    print(prune_by_policy(journal, Retention(**policy), STEPS_PER_EPOCH, debris_after_s=debris_after_s))


def publish_once(store: str) -> None:
    """Write the run's report once, as its newest attempt."""
    from holdfast.extensions.report.publishing import Publisher

    journal = Journal(open_store(store), "run")
    Publisher(journal).publish(journal.attempts())


def unpack_file(store: str, path: str) -> None:
    """Unpack a packed checkpoint."""
    from holdfast.extensions.pack.pack import unpack

    with Path(path).open("rb") as file:
        unpack(file, open_store(store))


def train_once(store: str) -> None:
    """Continue the run as its next attempt, by one commit."""
    line = make_line(open_store(store))
    with line.journal.fenced(line.attempt):
        train(line)


def _stop_before(stop: str) -> None:
    """Let this process stop itself once, just before it calls a method of its store with such a name."""
    verb, name = stop.split()
    whole: Callable[..., Any] = getattr(LocalStore, verb)
    has_slept = False

    def stopping(self: LocalStore, named: str, *arguments: Any) -> Any:
        nonlocal has_slept
        if named.startswith(name) and not has_slept:
            has_slept = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return whole(self, named, *arguments)

    setattr(LocalStore, verb, stopping)


def main(store: str, work: str, arguments: str, *stops: str) -> int:
    """Do the work; return the exit code."""
    for stop in stops:
        _stop_before(stop)
    try:
        globals()[work](store, **json.loads(arguments))
    except HoldfastError as error:
        print(f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
