"""A program that writes a run without training: ``python -m tests.support.writer STORE COMMITS``.

Each checkpoint's bytes follow from its parent's, so the last one shows whether every chunk was made once and in order.
"""

import sys
import time

from holdfast.config import Retention
from holdfast.errors import HoldfastError
from holdfast.retention import prune
from holdfast.store import open_store
from tests.support.makers import STEPS_PER_EPOCH, make_line, train


def main(store: str, commits: int, pause_s: float = 0.0) -> int:
    """Begin or continue the run until it has this number of commits; return the exit code."""
    try:
        line = make_line(open_store(store))
        while line.head is None or line.head.epoch < commits:
            time.sleep(pause_s)
            train(line)
            prune(line.journal, Retention(keep_last=2), STEPS_PER_EPOCH)
    except HoldfastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    store, commits, *pause_s = sys.argv[1:]
    if pause_s:  # wait for a line on stdin, so that two writers can begin at the same time
        sys.stdin.readline()
    sys.exit(main(store, int(commits), *map(float, pause_s)))
