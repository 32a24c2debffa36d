"""The decision whether a run gets another attempt, and when: pure functions of how its attempts ended.

`holdfast.journal.endings` lists the reasons, and the budget that each spends. Lost machines count over the whole life
of the run. Failures count in a row: a committed step resets their number.
"""

from collections.abc import Sequence

from holdfast.config import Supervision
from holdfast.errors import NoProgress
from holdfast.journal.endings import Ending

LONGEST_BACKOFF_S = 300.0


def judge(ends: Sequence[Ending], limits: Supervision) -> float:
    """Return the seconds to wait before the next attempt.

    Args:
        ends: how each attempt of the run ended, oldest first; the last one didn't complete the run.

    Raises:
        WrongUse, Damage, Superseded: another attempt can't help.
        NoProgress: a budget is spent.
        RunStopped: a person cancelled the attempt.
    """
    last = ends[-1]
    if last.row.raises is not None:
        raise last.row.raises(last.message or f"the attempt was {last.reason}", step=last.step)
    lost = sum(map(_is_lost_machine, ends))
    if _is_lost_machine(last) and limits.max_preemptions is not None and lost > limits.max_preemptions:
        raise NoProgress(
            f"{lost} machines were lost, and supervision.max_preemptions is {limits.max_preemptions}; the last: {last}",
            hint="raise supervision.max_preemptions and start the run again: it continues",
            step=last.step,
        )
    idle = without_progress(ends)
    failures = [end for end in idle if not _is_lost_machine(end)]
    if len(failures) >= limits.max_failures:
        raise NoProgress(
            f"{len(failures)} attempts in a row failed with no step committed in between; the last: {failures[-1]}",
            hint="mend that and start the run again: it continues from its last verified checkpoint",
            step=last.step,
        )
    return min(limits.backoff_s * 2.0 ** (len(idle) - 1), LONGEST_BACKOFF_S) if idle else 0.0


def _is_lost_machine(end: Ending) -> bool:
    return end.row.spends == "max_preemptions"


def without_progress(ends: Sequence[Ending]) -> list[Ending]:
    """Return the endings after the last attempt that committed a new step."""
    idle: list[Ending] = []
    furthest = 0
    for end in ends:
        idle = [] if end.step > furthest else [*idle, end]
        furthest = max(furthest, end.step)
    return idle
