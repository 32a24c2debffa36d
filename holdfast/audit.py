"""Is a checkpoint what its steps give? A chunk of a run, trained again and compared to the bit."""

import random
from typing import Any

from pydantic import BaseModel, ConfigDict

from holdfast import checkpoint
from holdfast.attempt.lineage import Present, changes_since, promise_for
from holdfast.checkpoint import Saved
from holdfast.errors import GateTripped
from holdfast.journal import Commit, Journal
from holdfast.replay import find_difference, read_trail, replayed
from holdfast.store import Store

SHOWN_NAMES = 8


class Audit(BaseModel):
    """What an audit of one commit found.

    Attributes:
        start, stop: the steps ``(start, stop]`` that were trained again.
        expected, found: the content id that was committed and the replay's; empty where the gate refused the parent.
        gate: why it refused it.
        first_step: the first step whose trail differs; None where the trails are equal.
        first_differs_in: what differs there, causes first.
        different: names of the tensors and values that differ at the end, the first part of a name is its component.
        notes: what forbids to promise equal bits here, and what has changed since.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    commit: int
    path: str
    start: int
    stop: int
    expected: str
    found: str = ""
    gate: str = ""
    first_step: int | None = None
    first_differs_in: list[str] = []
    different: list[str] = []
    notes: list[str] = []

    @property
    def is_identical(self) -> bool:
        return self.expected == self.found

    @property
    def is_failed(self) -> bool:
        """Whether the bits differ although they are promised."""
        return not self.is_identical and not self.notes

    def __str__(self) -> str:
        what = f"commit {self.commit} ({self.path}, steps {self.start}-{self.stop})"
        if self.is_identical:
            return f"{what}: replayed to the same bytes, {self.expected}"
        if self.gate:
            return "\n".join([f"{what}: it can't be replayed from its parent", f"  {self.gate}", *self._not_promised()])
        lines = [f"{what}: the replay ends on other bytes: {self.found[:12]}, not {self.expected[:12]}"]
        lines += describe_difference(self.first_step, self.first_differs_in, self.different)
        return "\n".join([*lines, *self._not_promised()])

    def _not_promised(self) -> list[str]:
        return [f"  not promised here: {note}" for note in self.notes]


def describe_difference(step: int | None, fields: list[str], different: list[str]) -> list[str]:
    """Where two runs of the same steps part, a line each, as a person reads it."""
    lines = [f"  first in step {step}: {', '.join(fields)}"] if step is not None else []
    if step is None and different:
        lines = ["  every step has the same samples, loss, gradient and random numbers"]
    if different:
        lines.append(f"  then, at the end: {checkpoint.shorten(different, SHOWN_NAMES)}")
    return lines


def audit_commit(journal: Journal, commit: Commit) -> Audit:
    """The commit's chunk, replayed from its parent in fresh processes.

    Raises:
        WrongUse: the parent's checkpoint was pruned.
        CheckpointDamaged: the parent, or the commit itself, is damaged.
        RunStopped: the replay ended early.
    """
    start = journal.read_commit(commit.parent).step if commit.parent else 0
    known: dict[str, Any] = {
        "run": journal.run, "commit": commit.number, "path": commit.path, "start": start, "stop": commit.step,
        "expected": commit.checkpoint_sha256,
    }  # fmt: skip
    try:
        with replayed(journal, commit) as (saved, folder, present):
            notes = _notes(journal, commit, present)
            found = saved.metadata.checkpoint_sha256
            if found == commit.checkpoint_sha256:
                return Audit(**known, found=found, notes=notes)
            return Audit(**known, found=found, notes=notes, **_difference(journal, commit, saved, folder))
    except GateTripped as error:
        # The parent is not what it was before the first step: that is the difference.
        return Audit(**known, gate=str(error), different=error.data.get("different", []))


def _notes(journal: Journal, commit: Commit, present: Present) -> list[str]:
    # Of packages the promise speaks; a newer Holdfast is no excuse for other bits.
    changes = [str(change) for change in changes_since(journal, commit, present) if change.kind != "package"]
    return [*changes, *promise_for(journal, commit, present).reasons]


def _difference(journal: Journal, commit: Commit, saved: Saved, folder: Store) -> dict[str, Any]:
    trails = read_trail(journal.store, commit.path), read_trail(folder, saved.path)
    return find_difference(
        trails, (checkpoint.read_payload(journal.store, commit), checkpoint.read_saved(folder, saved))
    )


def choose_commits(journal: Journal, number: int, seed: int | None = None) -> list[Commit]:
    """Commits at random that can be replayed, oldest first; all of them if there are no more.

    Args:
        number: how many.
        seed: the same one chooses the same.
    """
    there = {commit.number: commit for commit in journal.candidates()}
    replayable = [commit for commit in there.values() if not commit.parent or commit.parent in there]
    chosen = random.Random(seed).sample(replayable, min(number, len(replayable)))
    return sorted(chosen, key=lambda commit: commit.number)
