"""The result of `holdfast prove`, and its text for a person."""

import itertools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from holdfast.checkpoint.found import Found
from holdfast.proof.differing import Differing
from holdfast.proof.kills import describe_phases

SHOWN = 5


class Proof(Differing, BaseModel):
    """The result of `prove`.

    If the gate refused a resume, the trails are compared up to the resume's step, and ``different`` has the names that
    the gate reported.

    Attributes:
        kills: the steps in which SIGKILL ended the ranks.
        chunks: the steps at which a chunk of the killed run ended.
        ranks: the number of ranks at each start of the killed run; after the last number the list begins again. The
            straight run had the first number.
        resumed_from: the steps of the checkpoints from which the killed run resumed or tried to resume.
        steps_per_epoch: the number of steps of an epoch in this proof; a proof may shorten epochs.
        own_steps_per_epoch: the number of steps of an epoch in the recipe.
        epochs: the number of epochs that the user's code saw in this proof; a proof may raise it.
        own_epochs: the number of epochs in the configuration; 0 in a proof of an earlier version.
        is_whole: whether the proof trained all steps of the run, with the run's own epochs.
        straight, resumed: the last content ids of the two runs; ``resumed`` is empty if the gate refused to resume.
        gate: why the gate refused a resume; empty if it passed all resumes.
        lost: a line for each value that a resumed process had lost, because no checkpoint contains the value. Such
            values explain a failed proof. If the bytes are equal, no step of the proof depended on these values.
        products: those lines of ``lost`` that name a module or an optimizer. Steps change it, and an evaluation or the
            code after the loop may read it, even if the bytes are equal.
        unchanged: a line for each object whose state no checkpoint contains and no step changed.
        looked_at: the number of the user's functions, classes and objects that the search for such state has visited.
        not_reached: a line for each case that this proof didn't test.
        environment: the machine and the versions of both runs.
    """

    recipe: str
    config_fingerprint: str
    seed: int
    steps: int
    kills: list[int]
    chunks: list[int]
    ranks: list[int] = [1]
    resumed_from: list[int]
    steps_per_epoch: int
    own_steps_per_epoch: int
    epochs: int = 0
    own_epochs: int = 0
    is_whole: bool = False
    straight: str
    resumed: str = ""
    gate: str = ""
    lost: list[str] = []
    products: list[str] = []
    unchanged: list[str] = []
    looked_at: int = 1
    not_reached: list[str] = []
    environment: dict[str, Any]

    @property
    def is_proved(self) -> bool:
        return self.straight == self.resumed

    @property
    def _differs_from_itself(self) -> bool:
        return self.first_step is not None and self.first_step <= min(self.resumed_from)

    def __str__(self) -> str:
        lines = self._describe_verdict()
        if self._differs_from_itself:
            lines.append(
                "  this is before the first resume: the recipe gives different bytes each time, even without a kill"
            )
        elif not self.is_proved:
            lines += [f"  no checkpoint has {line}" for line in _cut(self.lost)]
        rows = [("content id", self.straight), ("settings", self.config_fingerprint), ("ran on", self._machine())]
        rows += [("ranks", self._describe_ranks())] if len({*self.ranks}) > 1 else []
        rows += [("resumed at", describe_phases(self.resumed_from, self.steps_per_epoch))]
        if self.is_proved:
            lines += [f"  not kept, though steps change it: {line}" for line in _cut(self.products)]
            rows += [("not reached", line) for line in self.not_reached]
            unused = [line for line in self.lost if line not in self.products]
            rows += [("not kept", f"{line}; no byte depended on it in these steps") for line in _cut(unused)]
        rows += [("not kept", f"{line}; it did not change in these steps") for line in _cut(self.unchanged)]
        if not self.looked_at:
            rows += [
                (
                    "unsearched",
                    "the recipe has no function or class of yours, so no search for forgotten state was made",
                )
            ]
        ranks = f" --ranks {','.join(map(str, self.ranks))}" if len({*self.ranks}) > 1 else ""
        steps = "--whole" if self.is_whole else f"--steps {self.steps}"
        rows += [("again with", f"--seed {self.seed} {steps} --kills {len(self.kills)}{ranks}")]
        return "\n".join([*lines, *(f"  {name:12}{value}" for name, value in rows)])

    def _describe_verdict(self) -> list[str]:
        what = f"{self.steps} steps of {self.recipe}"
        killed = f"SIGKILL in step{'' if len(self.kills) == 1 else 's'} {', '.join(map(str, self.kills))}"
        if self.is_proved:
            chunks = f"in {len(self.chunks)} chunks"
            return [f"proved: {what} end on the same bytes, straight and with {killed}, {chunks}"]
        if self.gate:
            lines = [f"not proved: {what}, with {killed}: the gate refuses to resume", f"  {self.gate}"]
            return lines + self.describe_first()
        lines = [f"not proved: {what} end on different bytes with {killed}"]
        return lines + self.describe_difference()

    def _describe_ranks(self) -> str:
        """Return a phrase with the rank counts of the straight run, and of the killed run between its kills."""
        lives = [number for number, _ in zip(itertools.cycle(self.ranks), [0, *self.resumed_from], strict=False)]
        return f"{self.ranks[0]} straight, and {', '.join(map(str, lives[:-1]))} and {lives[-1]} between the kills"

    def _machine(self) -> str:
        known = self.environment
        gpus = ", ".join(gpu["name"] for gpu in known.get("gpus", [])) if known.get("device") == "cuda" else ""
        return f"torch {known['torch']}, {gpus or known['cpu']}, {known['system']}, threads: {known['threads']}"


def describe_found(found: Found) -> str:
    """Return the line that a proof prints for a value that no checkpoint contains."""
    return f"{found}: {found.remedy}"


def list_unchanged(built: Sequence[Found], straight: Sequence[Found], lost: Sequence[Found]) -> list[Found]:
    """Return the objects that the proof can't judge, because no checkpoint has their state and no step changed it.

    Args:
        built: the values outside the checkpoint that were found before the first step.
        straight: the values outside the checkpoint that were found at the end of the straight run.
        lost: the values that a resume is known to lose.
    """
    before, known = {found.key: found.sha256 for found in built}, {found.key for found in lost}
    own = (found for found in straight if not found.is_plain and found.key not in known)
    return [found for found in own if before.get(found.key) == found.sha256]


def _cut(lines: Sequence[str]) -> list[str]:
    more = [f"{len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]


def list_not_reached(
    steps: int,
    lengths: tuple[int, int],
    counts: tuple[int, int],
    events: dict[str, float],
    ranks: int,
    workers: int,
    device: str,
) -> list[str]:
    """Return a line for each case that a proof did not test.

    Args:
        steps: the steps that the proof trained.
        lengths: the number of steps of an epoch in the proof, and in the recipe.
        counts: the number of epochs in the proof, and in the configuration.
        events: see `holdfast.training.list_events`.
    """
    lines = []
    if lengths[0] < lengths[1]:
        lines.append(f"the end of an epoch of {lengths[1]} steps: here an epoch has {lengths[0]}")
    if counts[0] != counts[1]:
        lines.append(f"a run of {counts[1]} epochs: here the run has {counts[0]}; --whole proves the run as it is")
    later = [f"{name} (step {step:g})" for name, step in events.items() if step > steps]
    lines += ["; ".join(later)] if later else []
    others = {"a GPU": device != "cuda", "several ranks": ranks == 1, "loader workers": not workers}
    lines += [", ".join(name for name, is_missing in others.items() if is_missing)] if any(others.values()) else []
    return lines
