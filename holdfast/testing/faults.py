"""Real deaths at named points: ``HOLDFAST_FAULT="commit-recorded:2:both:/tmp/struck"``.

The parts are a point of `holdfast.faults.POINTS`, the pass at which to strike (counted from 1 in each process), whom
SIGKILL ends (``self``; ``other``: a rank's attempt, or an attempt's ranks; or ``both``), and a file that is made when
the fault strikes. Where it exists, nothing happens: a fault strikes once, however many processes inherit it.
"""

import collections
import os
import signal
from pathlib import Path

from holdfast.faults import POINTS

_passes: collections.Counter[str] = collections.Counter()


def fault(point: str, nth: int, victim: str, struck: Path) -> dict[str, str]:
    """The environment in which a run dies, once, at a point; the file ``struck`` then exists."""
    if point not in POINTS or victim not in ("self", "other", "both") or nth < 1:
        raise ValueError(f"no such fault: {point}:{nth}:{victim}")
    return {"HOLDFAST_FAULT": f"{point}:{nth}:{victim}:{struck}"}


def strike(point: str) -> None:
    """Kill whom HOLDFAST_FAULT names, if this is the point and the pass that it names."""
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
    """The process across the command pipe: of a rank its parent, of an attempt its ranks."""
    if _is_rank(os.getpid()):
        return [os.getppid()]
    lines = [path.read_text("utf-8") for path in Path("/proc/self/task").glob("*/children")]
    return [pid for line in lines for pid in map(int, line.split()) if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    try:
        return b"holdfast.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
