"""Named points at which a test may end this process; a real run passes them.

``HOLDFAST_FAULT="commit-recorded:2:both:/tmp/struck"`` asks for a death. Its parts are a point of `POINTS`, the pass at
which to strike (counted from 1 in each process), whom SIGKILL ends (``self``; ``other``: a rank's attempt, or an
attempt's ranks; or ``both``), and a file that the fault makes when it strikes. A fault strikes once, however many
processes inherit it: once its file exists, nothing happens.
"""

import collections
import os
import signal
from pathlib import Path

# A kill between any two leaves a run that resumes and a store that verifies.
POINTS = (
    "payload-written",  # a rank: every byte is with the operating system, none is promised
    "payload-durable",  # a rank: the payload has its name
    "metadata-durable",  # a rank: the checkpoint is complete and may be adopted
    "chunk-reported",  # the attempt: it knows of the checkpoint and has not committed it
    "commit-recorded",  # the attempt: the commit counts, latest.json is stale
    "latest-replaced",  # the attempt: the commit is done
)

_passes: collections.Counter[str] = collections.Counter()


def reach(point: str) -> None:
    """Pass a named point. Kill whom HOLDFAST_FAULT names, if it names this point and this pass."""
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


def _other_side() -> list[int]:
    """Return the processes across the command pipe: of a rank its parent, of an attempt its ranks."""
    if _is_rank(os.getpid()):
        return [os.getppid()]
    lines = [path.read_text("utf-8") for path in Path("/proc/self/task").glob("*/children")]
    return [pid for line in lines for pid in map(int, line.split()) if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    try:
        return b"holdfast.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
