"""Whether another attempt may help, and when: pure functions of how the attempts of a run have ended.

==================  ===================================================================  ==========================
reason              what happened                                                        another attempt
==================  ===================================================================  ==========================
``completed``       the run is complete                                                  no
``preempted``       told to end (SIGTERM, a cloud's notice, a drain file), it saved      yes, ``max_preemptions``
``vanished``        nothing was heard of it any more: its machine is gone                yes, ``max_preemptions``
``crashed``         its process died, and its worker saw that                            yes, ``max_failures``
``rank_crashed``    a rank died, and so did those that replaced it                       yes, ``max_failures``
``out_of_memory``   the recipe asked for more memory than there is                       yes, ``max_failures``
``recipe_failed``   the recipe's own code raised                                         yes, ``max_failures``
``unhealthy``       a health signal left its limits                                      yes, ``max_failures``
``store_failed``    the storage refused or failed                                        yes, ``max_failures``
``no_progress``     the same failure came at the same step again within it               yes, ``max_failures``
``stopped``         it ended early for another reason                                    yes, ``max_failures``
``folder_gone``     the run's folder was moved or deleted                                no
``settings``        settings or code changed, or can't be used                           no
``damaged``         nothing that can be trusted is left to continue from                 no
``superseded``      a later attempt, which somebody else has started, owns the run       no
``cancelled``       a person has cancelled it                                            no
``paused``          a person has paused it                                               when it is resumed
==================  ===================================================================  ==========================

Lost machines count over the whole life of the run; failures only in a row, with no step committed in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.config import Supervision
from holdfast.errors import Damage, HoldfastError, NoProgress, RunGone, RunStopped, Superseded, WrongUse
from holdfast.journal import Ending

REASONS = (
    "completed", "preempted", "vanished", "crashed", "rank_crashed", "out_of_memory", "recipe_failed", "unhealthy",
    "no_progress", "store_failed", "stopped", "folder_gone", "settings", "damaged", "superseded", "cancelled", "paused",
)  # fmt: skip
LOST_MACHINES = {"preempted", "vanished"}
ENDS_THE_RUN: dict[str, type[HoldfastError]] = {
    "folder_gone": RunGone,
    "settings": WrongUse, "damaged": Damage, "superseded": Superseded, "cancelled": RunStopped, "paused": RunStopped,
}  # fmt: skip
LONGEST_BACKOFF_S = 300.0


@dataclass(frozen=True)
class End:
    """How an attempt ended: its record's, or that of one that never claimed the run.

    Args:
        step: the newest that was committed then.
    """

    reason: str
    message: str = ""
    step: int = 0

    @classmethod
    def of(cls, ending: Ending) -> "End":
        return cls(ending.reason, ending.message, ending.step)

    def __str__(self) -> str:
        return f"{self.reason.replace('_', ' ')}: {self.message}" if self.message else self.reason.replace("_", " ")


def reason_of(error: BaseException) -> str:
    """Why an attempt that has raised this has ended."""
    if isinstance(error, HoldfastError):
        return str(error.data.get("reason", error.reason))
    return "stopped"


def judge(ends: Sequence[End], limits: Supervision) -> float:
    """How many seconds to wait before the next attempt.

    Args:
        ends: how all attempts of the run have ended, oldest first; the last one just now, and not completed.

    Raises:
        WrongUse, Damage, Superseded: another attempt can't help.
        NoProgress: a budget is spent.
        RunStopped: it was cancelled.
    """
    last = ends[-1]
    if cls := ENDS_THE_RUN.get(last.reason):
        raise cls(last.message or f"the attempt was {last.reason}", step=last.step)
    lost = sum(end.reason in LOST_MACHINES for end in ends)
    if last.reason in LOST_MACHINES and limits.max_preemptions is not None and lost > limits.max_preemptions:
        raise NoProgress(
            f"{lost} machines were lost, and supervision.max_preemptions is {limits.max_preemptions}; the last: {last}",
            hint="the same run, started again with a higher one, continues",
            step=last.step,
        )
    idle = without_progress(ends)
    failures = [end for end in idle if end.reason not in LOST_MACHINES]
    if len(failures) >= limits.max_failures:
        raise NoProgress(
            f"{len(failures)} attempts in a row failed with no step committed in between; the last: {failures[-1]}",
            hint="the run continues from its last verified checkpoint as soon as that is mended",
            step=last.step,
        )
    return min(limits.backoff_s * 2.0 ** (len(idle) - 1), LONGEST_BACKOFF_S) if idle else 0.0


def without_progress(ends: Sequence[End]) -> list[End]:
    """The attempts at the end of the row that have committed no step."""
    idle: list[End] = []
    furthest = 0
    for end in ends:
        idle = [] if end.step > furthest else [*idle, end]
        furthest = max(furthest, end.step)
    return idle
