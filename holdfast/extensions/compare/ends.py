"""The steps after which only one of two trainings has run a loop's code at the end of the epoch.

This code runs before the checkpoint of the epoch's last step. The code runs after that checkpoint in two cases: the
ranks had to stop at once, or an earlier version of Holdfast trained the step and the step wasn't the run's last. If the
code ran before the checkpoint in only one of two runs, the state and the trail's line of that step have its effects
only in that run. In the second run the effects appear one step later.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast import checkpoint
from holdfast.checkpoint import Lines
from holdfast.extensions.compare.ancestry import Ancestry
from holdfast.journal import Commit

# The code at an epoch's end may change these fields in a step's line of the trail, and in each rank's entry there.
AFTER_STEP = {"rng", "metrics", "logged", "state"}


def find_ended_side(one: Ancestry, other: Ancestry, pair: tuple[Commit, Commit]) -> Ancestry | None:
    """Return the training that has run the code at the epoch's end; None if both trainings or neither have run it."""
    ended = [_has_ended_epoch(line, commit) for line, commit in zip((one, other), pair, strict=True)]
    return None if ended[0] == ended[1] else (one, other)[ended.index(True)]


def _has_ended_epoch(line: Ancestry, commit: Commit) -> bool:
    """Return whether a commit's state has the effects of the code at the epoch's end.

    If the checkpoint can't be read, the journal decides: the result is True if the commit completed a run with a loop.
    """
    known = checkpoint.read_ended_epoch(line.journal.store, commit)
    if known is not None:
        return known
    record = line.journal.read_ending(commit.attempt)
    was_complete = record is not None and (record.reason, record.step) == ("completed", commit.step)
    return was_complete and "loop" in line.read_past(commit).environment.get("built", {})


def leave_out_ends(lines: Lines, steps: Sequence[int]) -> Lines:
    """Return a trail without the fields that the code at an epoch's end changes.

    Args:
        lines: the trail.
        steps: the last steps of the epochs at whose end only one training has run this code. The line of the step after
            each of them loses the numbers that the loop logged, too.
    """
    left_out: dict[int, set[str]] = {}
    for step in steps:
        left_out[step] = AFTER_STEP
        left_out.setdefault(step + 1, {"logged"})
    return [_leave_out(line, left_out[line["step"]]) if line["step"] in left_out else line for line in lines]


def _leave_out(line: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    kept = {name: value for name, value in line.items() if name not in names}
    if "parts" in kept:
        kept["parts"] = [_leave_out(part, names) for part in kept["parts"]]
    return kept


def describe_end(ended: Ancestry, other: Ancestry, step: int) -> str:
    """Return the note on a step after which only ``ended`` has run the code at the epoch's end."""
    return (
        f"the states at step {step} weren't compared: the checkpoint of {ended.label} comes after the loop's code at "
        f"the end of the epoch, and the checkpoint of {other.label} before that code"
    )
