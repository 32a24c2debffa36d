"""The supervisor's next action for a run on a work pool: pure functions of the facts about the run's attempts.

=============================================================  ====================================================
what is known                                                  `choose_action`
=============================================================  ====================================================
an attempt lives                                               watch it
the last attempt was cancelled while it was watched            end: cancelled
the last attempt was cancelled before that, or completed       end if the run is complete, else start another
the server refused to begin the last attempt                   the same, after a wait; each further wait is doubled
the last attempt's end spends a budget that isn't used up      the same; the wait is doubled until a commit is made
the last attempt's end spends a budget that is used up         raise `NoProgress`
another attempt can't help                                     raise the error for the reason
=============================================================  ====================================================

A run is complete if three things are true: the journal says so; no process died during the work after the last commit;
and if the settings have changed since the run was completed, an attempt has judged the new settings.

`holdfast.journal.endings` lists the reasons, and the budget that each spends. Lost machines count over the whole life
of the run. Failures count in a row: a committed step resets their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.config import Supervision
from holdfast.errors import NoProgress
from holdfast.journal.endings import Ending

# The first wait after the server has refused to begin an attempt. Each further wait is twice as long.
REFUSED_BACKOFF_S = 5.0
LONGEST_BACKOFF_S = 300.0
# The first wait after an attempt without progress.
FIRST_BACKOFF_S = 1.0


@dataclass(frozen=True)
class Supervised:
    """The facts that a supervisor knows about a run on a work pool.

    Attributes:
        is_live: whether a living attempt exists that isn't watched yet.
        is_finished: whether the journal has all steps of the run, and says that its last attempt completed the run.
        is_disputed: whether the run was finished with different settings, and no attempt has judged the present
        settings.
        is_dead: whether the last attempt's process died, perhaps after its last commit and before its report.
        last: how the last watched attempt ended; None if it never began, or no attempt was watched.
        was_cancelled: whether the last watched attempt was already being cancelled when the watch began.
        refusals: how many attempts in a row, up to the last attempt, the server has refused to begin.
        endings: how each attempt of the run ended, oldest first. The last item is `last`.
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
        ending: how the run ends; None if it continues.
        wait_s: the seconds to wait before the next attempt is started.
    """

    ending: Ending | None = None
    wait_s: float = 0.0


def choose_action(known: Supervised, limits: Supervision) -> Action:
    """Return the next action for a run; see the table above.

    Raises:
        WrongUse, Damage, Superseded: a further attempt can't help.
        NoProgress: a budget is used up; the message has the last error.
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
        ends: how each attempt of the run ended, oldest first. The last attempt didn't complete the run.

    Raises:
        WrongUse, Damage, Superseded: a further attempt can't help.
        NoProgress: a budget is used up.
        RunStopped: a person cancelled the attempt.
    """
    last = ends[-1]
    if last.row.raises is not None:
        raise last.row.raises(last.message or f"the attempt was {last.reason}", step=last.step)
    lost = sum(map(_is_lost_machine, ends))
    if _is_lost_machine(last) and limits.max_preemptions is not None and lost > limits.max_preemptions:
        raise NoProgress(
            f"the run has lost {lost} machines, and supervision.max_preemptions allows {limits.max_preemptions}; the "
            f"last one: {last}",
            hint="raise supervision.max_preemptions and start the run again: it continues",
            step=last.step,
        )
    idle = without_progress(ends)
    failures = [end for end in idle if not _is_lost_machine(end)]
    if len(failures) >= limits.max_failures:
        raise NoProgress(
            f"{len(failures)} attempts in a row failed, and committed no step; the last failure: {failures[-1]}",
            hint="fix the cause and start the run again: it continues from its last verified checkpoint",
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
