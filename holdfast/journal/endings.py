"""The reasons why an attempt ends, one row each. To add a reason, add its row, and the error or the code that uses it.

FORMAT.md lists the names and the meanings, and a test compares both lists. The other columns decide whether another
attempt starts, how long chunks are, and which states Prefect shows.
"""

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import Damage, HoldfastError, Inexact, RunGone, RunHeld, RunStopped, Superseded, WrongUse


@dataclass(frozen=True)
class Reason:
    """One reason why an attempt ends.

    Attributes:
        meaning: what happened, as a text for the user.
        spends: the budget in `supervision` that a further attempt uses up; empty if a further attempt can't help.
        is_loss: whether the attempt lost steps without warning, which makes automatic chunks shorter.
        is_own: whether the attempt itself records this ending. If False, its supervisor or the next attempt records it.
        state: the type of the state that Prefect shows for the attempt.
        raises: the error that ends the run, if no further attempt is started.
    """

    name: str
    meaning: str
    spends: Literal["max_preemptions", "max_failures", ""] = ""
    is_loss: bool = False
    is_own: bool = True
    state: Literal["Completed", "Failed", "Crashed", "Cancelled", "Paused"] = "Failed"
    raises: type[HoldfastError] | None = None

    @property
    def retries(self) -> bool:
        """True if a further attempt may help; ``spends`` names the budget that this attempt uses up."""
        return bool(self.spends)


MACHINE: Literal["max_preemptions"] = "max_preemptions"
FAILURE: Literal["max_failures"] = "max_failures"
_ROWS = (
    Reason("completed", "the run is complete", state="Completed"),
    Reason(
        "preempted",
        "SIGTERM, a cloud's notice or a drain file told the attempt to end, and the attempt saved first",
        MACHINE,
        state="Completed",
    ),
    Reason(
        "imported", "the attempt imported another program's checkpoint, from which the run continues", state="Completed"
    ),
    Reason(
        "vanished",
        "heartbeats stopped: the attempt's process or machine is gone",
        MACHINE,
        True,
        False,
        "Crashed",
    ),
    Reason("crashed", "the attempt's process died, and its Prefect worker noticed", FAILURE, True, False, "Crashed"),
    Reason("rank_crashed", "a rank died, and so did the ranks that replaced it", FAILURE, True),
    Reason("rank_hung", "a rank made no progress, and neither did the ranks that replaced it", FAILURE, True),
    Reason("out_of_memory", "the recipe asked for more memory than there is", FAILURE),
    Reason("recipe_failed", "the recipe's own code raised an error", FAILURE),
    Reason("unhealthy", "a health signal left its limits", FAILURE),
    Reason("gpu_unhealthy", "a GPU of the attempt's machine, or its driver, reports a fault", FAILURE),
    Reason(
        "self_test_failed",
        "a device of the attempt's machine computed different bits when it repeated a computation",
        FAILURE,
    ),
    Reason(
        "machine_quarantined",
        "the store has quarantined the attempt's machine, because it has computed wrongly",
        MACHINE,
    ),
    Reason("machine_refused", "an extension, or a drain file, refuses the attempt's machine", MACHINE),
    Reason("no_progress", "a failure happened again at the same step", FAILURE),
    Reason("store_failed", "the storage refused or failed", FAILURE),
    Reason("stopped", "the attempt ended early for another reason", FAILURE),
    Reason("folder_gone", "the run's folder was moved or deleted", raises=RunGone),
    Reason("settings", "settings or code changed, or can't be used", raises=WrongUse),
    Reason(
        "refused",
        "the gate refused the checkpoint: the resumed model differs from the saved one, or isn't healthy",
        raises=Damage,
    ),
    Reason("damaged", "no undamaged and trusted checkpoint is left to continue from", raises=Damage),
    Reason(
        "inexact",
        "the resumed run trains different values than a run without an interruption",
        raises=Inexact,
    ),
    Reason("superseded", "another process has started a later attempt, which owns the run", raises=Superseded),
    Reason(
        "held",
        "audits found that a machine computes wrongly; no attempt trains the run until a person releases the run",
        raises=RunHeld,
    ),
    Reason("released", "a person released the run after audits had held it", state="Completed"),
    Reason("cancelled", "a person cancelled the attempt", state="Cancelled", raises=RunStopped),
    Reason(
        "paused",
        "a person paused the attempt; when resumed, the run continues as a new attempt",
        state="Paused",
        raises=RunStopped,
    ),
)
REASONS = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class Ending:
    """The ending of an attempt, recorded or not.

    Attributes:
        reason: a name in `REASONS`, or an unknown name in a record of a later version.
        step: the newest step that was committed when the attempt ended.
    """

    reason: str
    message: str = ""
    step: int = 0

    @property
    def row(self) -> Reason:
        """The reason's row in `REASONS`; for a reason that this version doesn't know, the row of ``stopped``."""
        return REASONS.get(self.reason, REASONS["stopped"])

    def __str__(self) -> str:
        reason = self.reason.replace("_", " ")
        return f"{reason}: {self.message}" if self.message else reason


TOLD_BY_A_SIGNAL = Ending("preempted", "told to end by a signal")


def ending_of(error: BaseException | None) -> Ending:
    """Return the ending of an attempt that raised an error. Without an error, the attempt completed the run."""
    if error is None:
        return Ending("completed")
    if isinstance(error, HoldfastError):
        message = f"{error}; {error.hint}" if error.hint else str(error)
        return Ending(str(error.data.get("reason", error.reason)), message)
    if isinstance(error, Exception):
        return Ending("stopped", f"{type(error).__name__}: {error}")
    return TOLD_BY_A_SIGNAL
