"""Terminals for tests: run a command in a pseudo-terminal, as a person does."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable

from tests.conftest import ROOT

BEGINS_WITHIN_S = 300.0
# Enough for a busy machine. If Ctrl-C reached Prefect's server, the command would wait for more than 100 s.
ENDS_WITHIN_S = 60.0


def _control() -> None:
    """Make the terminal of standard input this process's own."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, around the tests, would be inherited
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in its own pseudo-terminal, with the text on its screen."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, env=os.environ | environment, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=_control,
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def read(self, within_s: float = 0.1) -> None:
        """Read new output and add it to the screen."""
        with contextlib.suppress(OSError):  # the terminal is closed
            while select.select([self._master], [], [], within_s)[0] and (data := os.read(self._master, 65536)):
                self.screen += data.decode(errors="replace")
                within_s = 0

    def await_true(self, is_so: Callable[[], bool], within_s: float = BEGINS_WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not is_so():
            self.read()
            assert self.process.poll() is None, self.screen
            assert time.monotonic() < deadline, self.screen

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, as a shell needs it."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        """Close the terminal, which sends SIGHUP to the process."""
        os.close(self._master)

    def finish(self, within_s: float = ENDS_WITHIN_S) -> int:
        """Wait until the process has ended and return its exit code."""
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline, f"it continues after {within_s:.0f} s; the screen: {self.screen}"
        self.read()
        return self.process.returncode
