"""Messages about a checkpoint that the gate refuses although its bytes verify: cause, suspects, next action."""

from typing import TypeGuard

from holdfast.errors import GateTripped
from holdfast.journal import Commit
from holdfast.rank.messages import Problem, Restored, Tripped

# The largest number of suspects that a message names.
SHOWN_SUSPECTS = 4
# The reason (`Commit.why`) of a checkpoint for a rehearsal, which no commit names.
FOR_REHEARSAL = "rehearsal"
# The warning if new ranks pass the gate that the last ranks failed; %s is the checkpoint's folder.
CHANCE = (
    "the gate refused %s once, and new ranks then restored it exactly: either this machine's memory or processor "
    "fails now and then, or the program computes different values each time"
)
NO_SUSPECT = (
    "no cause was found: check the global variables, the files and the environment variables that the model, the "
    "loss and Recipe(probe=...) read"
)
# The hint for each kind of refusal.
HINTS = {
    "state": "the checkpoint is undamaged, and an older one would fail in the same way: a load_state_dict, a hook, or "
    "the code that builds these objects changes the values after they are loaded. Fix that code, and start again",
    "health": "check the limits of Recipe(health=...); holdfast evaluate shows the values",
    "results": "the checkpoint is undamaged, and an older one would fail in the same way. Save that state (a buffer, "
    "extras, run.keep), check with holdfast prove, and train under another name (--set run=...). If prove passes, a "
    "machine has failed, this one or the one that saved: holdfast doctor checks this one, holdfast quarantine rejects "
    "the commit. holdfast docs troubleshooting#state-that-no-checkpoint-has has the steps. "
    """To continue with different results, and record that: --set 'resume.accept_drift=["built"]'""",
}


def is_unexplained(event: Restored | Problem) -> TypeGuard[Tripped]:
    """Return whether the gate refuses an undamaged checkpoint for a reason other than its health."""
    return isinstance(event, Tripped) and not _refusal_of(event).blames_checkpoint


def _refusal_of(event: Tripped) -> GateTripped:
    error = event.error
    assert isinstance(error, GateTripped)
    return error


def explain_refusal(event: Tripped, commit: Commit) -> GateTripped:
    """Return the error for an undamaged checkpoint that the gate refuses.

    It names suspects: first the values that a model call changes, then those that the search for forgotten state finds.
    """
    error = _refusal_of(event)
    suspects: list[str] = [f"{each} changes when the model is called" for each in error.data.get("suspects", [])]
    suspects += error.data.get("found", [])
    which = "a rehearsal's checkpoint" if commit.why == FOR_REHEARSAL else f"commit {commit.number}"
    message = f"the gate refuses {which} ({commit.path}, step {commit.step}): {error.message}"
    data = error.data | {"suspects": suspects, "step": commit.step}
    lines = _list_suspects(suspects) if error.data["check"] == "results" else []
    return GateTripped("\n".join([message, *lines]), hint=HINTS[error.data["check"]], **data)


def _list_suspects(suspects: list[str]) -> list[str]:
    if not suspects:
        return [f"  {NO_SUSPECT}"]
    more = [f"  and {len(suspects) - SHOWN_SUSPECTS} more"] if len(suspects) > SHOWN_SUSPECTS else []
    return [f"  suspect: {each}" for each in suspects[:SHOWN_SUSPECTS]] + more
