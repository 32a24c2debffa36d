"""Disaster drills: kill an attempt, its ranks or its worker at chosen steps, and compare the bytes at the run's end."""

import os
import signal
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from holdfast.attempt import AttemptView, Observer
from holdfast.checkpoint import read_payload
from holdfast.journal import Commit, Journal
from holdfast.machine.processes import read_command
from holdfast.proof.differing import Differing, find_difference
from holdfast.proof.replay import read_run_trail
from holdfast.rank.messages import Progress

VARIABLE = "HOLDFAST_DRILL"


class Kill(BaseModel):
    """One kill of a drill: the victim, the signal and the step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: Literal["ranks", "attempt", "worker", "machine"] = Field(
        "machine",
        description="ranks: the training processes. attempt: the process that commands them. "
        "worker: the process that started the attempt. machine: all of these.",
    )
    how: Literal["SIGTERM", "SIGKILL"] = "SIGKILL"
    at_step: int = Field(ge=1, description="Strike as soon as this step is done.")

    @property
    def ends_attempt(self) -> bool:
        """Return whether this kill ends the attempt. An attempt replaces killed ranks, and dies of any other kill."""
        return self.what != "ranks"

    def __str__(self) -> str:
        return f"{self.how} to the {self.what} at step {self.at_step}"


KILLS = TypeAdapter(list[Kill])


def to_environment(kills: Sequence[Kill]) -> dict[str, str]:
    """Return the environment variables that make an attempt carry out these kills."""
    return {VARIABLE: KILLS.dump_json(list(kills)).decode()} if kills else {}


class Striker(Observer):
    """An observer that carries out the kills which `to_environment` has put into this process's environment, if any."""

    def __init__(self) -> None:
        self._kills = KILLS.validate_json(os.environ.get(VARIABLE, "[]"))

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        while self._kills and progress.step >= self._kills[0].at_step:
            _strike(self._kills.pop(0), attempt)


def left_after(kills: Sequence[Kill], ended_early: int) -> list[Kill]:
    """Return the kills that remain after this many attempts ended early.

    An attempt carries out the kills in their order, up to a kill that ends the attempt. The next attempt goes on with
    the kill after that.
    """
    left = list(kills)
    for _ in range(ended_early):
        while left and not left.pop(0).ends_attempt:
            pass
    return left


def _strike(kill: Kill, attempt: AttemptView) -> None:
    number = signal.Signals[kill.how]
    if kill.what in ("ranks", "machine"):
        attempt.signal_ranks(number)
    if kill.what in ("worker", "machine"):
        worker = os.getppid()
        if any(b"worker" in word for word in read_command(worker)):
            os.kill(worker, number)
    if kill.what in ("attempt", "machine"):
        os.kill(os.getpid(), number)


class DrillVerdict(Differing, BaseModel):
    """The result of a drill.

    Attributes:
        straight, drilled: the content ids of the two runs' last checkpoints.
        attempts: how each attempt of the drilled run ended.
    """

    kills: list[Kill]
    steps: int
    straight: str
    drilled: str
    attempts: list[str]

    @property
    def is_passed(self) -> bool:
        return self.straight == self.drilled

    def __str__(self) -> str:
        kills = ", ".join(map(str, self.kills))
        how = "on the same bytes" if self.is_passed else "on OTHER bytes"
        lines = [f"{'passed' if self.is_passed else 'failed'}: {self.steps} steps end {how}, straight and with {kills}"]
        lines.append(f"  content id  {self.straight}")
        if not self.is_passed:
            lines += [f"  drilled     {self.drilled}", *self.describe_difference()]
        return "\n".join([*lines, *(f"  attempt {number + 1:3} {end}" for number, end in enumerate(self.attempts))])


def judge_drill(kills: Sequence[Kill], straight: Journal, drilled: Journal) -> DrillVerdict:
    """Compare the last checkpoints of two complete runs of one configuration; return the verdict."""
    ends = [f"ended at step {end.step}: {end.reason.replace('_', ' ')}" for end in drilled.endings()]
    one, other = _newest(straight), _newest(drilled)
    found: dict[str, Any] = {
        "kills": list(kills), "steps": one.step, "attempts": ends,
        "straight": one.checkpoint_sha256, "drilled": other.checkpoint_sha256,
    }  # fmt: skip
    if one.checkpoint_sha256 != other.checkpoint_sha256:
        states = read_payload(straight.store, one), read_payload(drilled.store, other)
        found |= find_difference((read_run_trail(straight), read_run_trail(drilled)), states)
    return DrillVerdict(**found)


def _newest(journal: Journal) -> Commit:
    newest = journal.newest()
    assert newest is not None
    return newest
