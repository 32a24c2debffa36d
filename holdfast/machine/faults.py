"""Named points at which a test may kill this process; without a test they do nothing.

``HOLDFAST_FAULT="commit-recorded:2:both:/tmp/struck"`` asks for a SIGKILL. The variable has four parts: the name of a
point; when to kill, here when a process reaches this point for the second time; the processes to kill, which are
``self``, ``other`` (a rank's attempt, or an attempt's ranks) or ``both``; and a file that is created at the kill.
While this file exists no process is killed, so only one kill happens, however many processes inherit the variable.

``HOLDFAST_FLIP="1:/tmp/struck"`` flips one bit in the self-test of rank 1 (`holdfast.machine.self_test`), in the matrix
product of its second step. While the file exists, no bit is flipped. ``HOLDFAST_FLIP="1:"`` flips this bit in each step
of each self-test, as a broken adder would.
"""

import collections
import contextlib
import os
import signal
from pathlib import Path

from holdfast.machine.processes import is_rank

# The names of the points. A kill at any of them leaves a run that resumes and a store that verifies.
POINTS = (
    "payload-written",  # in a rank: the payload is written, but perhaps not durable
    "payload-durable",  # in a rank: the payload is durable and has its final name
    "metadata-durable",  # in a rank: the checkpoint is complete and may be adopted
    "chunk-reported",  # in the attempt: the checkpoint is reported, but not committed
    "commit-recorded",  # in the attempt: the commit counts, but latest.json is stale
    "latest-replaced",  # in the attempt: the commit is complete
)
# The points of a rehearsal, all in the attempt; a run that isn't rehearsed doesn't pass them.
REHEARSAL_POINTS = (
    "rehearsal-lived",  # the living ranks have trained the rehearsal's steps
    "rehearsal-restored",  # the new ranks have restored the checkpoint
    "rehearsal-trained",  # the new ranks have trained the steps, and nothing is compared yet
    "rehearsal-noted",  # the trails are equal, and the ranks that aren't needed any more have ended
)

# The points of a run with a near folder: its ranks also save into a folder on their node (see
# `checkpoint.near`).
NEAR_POINTS = (
    "near-durable",  # in a rank: the near folder has the whole checkpoint, the store has none of it
    "near-copied",  # in the attempt: the store has the copied checkpoint, but not its metadata.json
)

_passes: collections.Counter[str] = collections.Counter()


def reach(point: str) -> None:
    """Kill the processes in HOLDFAST_FAULT if it names this point and this pass; otherwise do nothing."""
    if "HOLDFAST_FAULT" not in os.environ:
        return
    name, nth, victim, struck = os.environ["HOLDFAST_FAULT"].split(":", 3)
    _passes[point] += 1
    if point != name or _passes[point] != int(nth) or Path(struck).exists():
        return
    Path(struck).touch()
    if victim in ("other", "both"):
        for pid in _other_side():
            os.kill(pid, signal.SIGKILL)
    if victim in ("self", "both"):
        os.kill(os.getpid(), signal.SIGKILL)


def takes_flips() -> tuple[bool, bool]:
    """Return two flags: whether to flip a bit in the self-test's first step, and whether in its second step.

    If HOLDFAST_FLIP names a file, create the file, so that no later self-test flips a bit.
    """
    rank, _, struck = os.environ.get("HOLDFAST_FLIP", "").partition(":")
    if rank != os.environ.get("RANK", "0"):
        return False, False
    if not struck:
        return True, True
    if Path(struck).exists():
        return False, False
    Path(struck).touch()
    return False, True


def _other_side() -> list[int]:
    """Return the process id of a rank's attempt if this process is a rank; otherwise those of the attempt's ranks."""
    if is_rank(os.getpid()):
        return [os.getppid()]
    pids = list[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            pids += map(int, path.read_text("utf-8").split())
    return [pid for pid in pids if is_rank(pid)]
