"""A program that writes a run without training: ``python -m tests.support.writer STORE COMMITS``, or forked.

Each checkpoint's bytes follow from its parent's, so the last one shows whether every chunk was made once and in order.
"""

import ctypes
import os
import sys
import time
import weakref
from typing import cast

from holdfast.config import Retention
from holdfast.errors import HoldfastError
from holdfast.keeping.retention import prune_by_policy
from holdfast.store import open_store
from tests.support.lives import Command, Lives
from tests.support.makers import STEPS_PER_EPOCH, make_line, train

# Of prctl, on Linux: any process of this user may trace this one.
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)


def main(store: str, commits: int, pause_s: float = 0.0) -> int:
    """Begin or continue the run until it has this number of commits; return the exit code."""
    try:
        line = make_line(open_store(store))
        while line.head is None or line.head.epoch < commits:
            time.sleep(pause_s)
            with line.journal.fenced(line.attempt):
                train(line)
            line.journal.check_fence(line.attempt)
            prune_by_policy(line.journal, Retention(keep_last=2), STEPS_PER_EPOCH)
    except HoldfastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def write_when_told(store: str, commits: int, pause_s: float) -> int:
    """Do as `main` does, after a line on the standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY)
    os.read(0, 1)
    return main(store, commits, pause_s)


class WaitingWriter:
    """A writer that a nursery has forked, and that begins when it is told to."""

    def __init__(self, nursery: Lives, store: str, commits: int, pause_s: float = 0.0) -> None:
        stdin, told = os.pipe()
        self._told = told
        weakref.finalize(self, os.close, told)
        self.process: Command = nursery.start_command(
            f"{__name__}:write_when_told", store, commits, pause_s, environment=dict(os.environ), stdin=stdin
        )
        os.close(stdin)

    def begin(self) -> None:
        os.write(self._told, b"!")

    def finish(self, within_s: float) -> tuple[int, str]:
        """Return the exit code and the errors, once it has ended."""
        _, err = self.process.communicate(within_s)
        return cast(int, self.process.returncode), err


if __name__ == "__main__":
    store, commits = sys.argv[1:]
    sys.exit(main(store, int(commits)))
