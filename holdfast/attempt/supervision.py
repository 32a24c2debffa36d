"""The next action for a run that attempts train on a work pool: pure functions of the facts about these attempts.

=============================================================  ====================================================
what is known                                                  `choose_action`
=============================================================  ====================================================
an attempt lives                                               watch it
the last one was cancelled while it was watched                end: cancelled
the last one was cancelled before that, or completed           end if the run is complete, else start the next one
the server refused to begin the last one                       likewise, after a wait that doubles
its reason spends a budget that is left                        likewise, after a wait that doubles without progress
its reason spends a budget that is spent                       raise `NoProgress`
another attempt can't help                                     raise the error of its reason
=============================================================  ====================================================

A run is complete if the journal says so, no process may have died in the work after the last commit, and no attempt has
still to judge other settings than the run was completed with.

`holdfast.journal.endings` lists the reasons, and the budget that each spends. Lost machines count over the whole life
of the run. Failures count in a row: a committed step resets their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.config import Supervision
from holdfast.errors import NoProgress
from holdfast.journal.endings import Ending

# The first wait after the server has refused to begin an attempt. The waits double.
REFUSED_BACKOFF_S = 5.0
LONGEST_BACKOFF_S = 300.0
# The first wait after an attempt without progress.
FIRST_BACKOFF_S = 1.0


@dataclass(frozen=True)
class Supervised:
    """A run on a work pool, as its supervisor knows it.

    Attributes:
        is_live: whether an attempt lives that isn't watched yet.
        is_finished: whether the journal has all steps of the run, and the ending of its last attempt as completed.
        is_disputed: whether it was finished with other settings than these, and no attempt has judged these.
        is_dead: whether the last attempt's process died, perhaps after its last commit and before its report.
        last: how the attempt ended that was watched last; None if it never began, or none was watched.
        was_cancelled: whether that attempt was being cancelled before it was watched.
        refusals: how many attempts in a row the server has refused to begin, up to the last one.
        endings: how each attempt of the run ended, oldest first; the last one is `last`.
    """

    is_live: bool = False
    is_finished: bool = False
    is_disputed: bool = False
    is_dead: bool = False
    last: Ending | None = None
    was_cancelled: bool = False
    refusals: int = 0
    endings: Sequence[Ending] = ()


@dataclass(frozen=True)
class Action:
    """The next action for a run: end it, watch its live attempt, or start an attempt after a wait.

    Attributes:
        ending: how the run ends; None to go on.
        wait_s: seconds to wait before the next attempt is started.
    """

    ending: Ending | None = None
    wait_s: float = 0.0


def choose_action(known: Supervised, limits: Supervision) -> Action:
    """Return the next action for a run; see the table above.

    Raises:
        WrongUse, Damage, Superseded: another attempt can't help.
        NoProgress: a budget is spent; the message has the last error.
    """
    last = known.last
    if known.is_live:
        return Action()
    if last is not None and last.reason == "cancelled" and not known.was_cancelled:
        return Action(last)
    wait_s = 0.0
    if known.refusals:
        wait_s = min(REFUSED_BACKOFF_S * 2.0 ** (known.refusals - 1), LONGEST_BACKOFF_S)
    elif last is not None and last.reason not in ("completed", "cancelled"):
        wait_s = choose_wait_s(known.endings, limits)
    if known.is_finished and not known.is_dead and not known.is_disputed:
        return Action(Ending("completed"))
    return Action(wait_s=wait_s)


def choose_wait_s(ends: Sequence[Ending], limits: Supervision) -> float:
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
    return min(FIRST_BACKOFF_S * 2.0 ** (len(idle) - 1), LONGEST_BACKOFF_S) if idle else 0.0


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
