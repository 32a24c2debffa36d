"""Observers of an attempt: a bar on the terminal, a table in Prefect's UI, a custom metric sink."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.config import RunConfig
from holdfast.errors import GateTripped, HoldfastError, StateError
from holdfast.extending import call_all, check_tables
from holdfast.journal import Commit, Journal
from holdfast.machine.heartbeats import Beat
from holdfast.rank.messages import Progress, Ready
from holdfast.recipe.named import import_class

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointVerdict:
    """A verdict on a commit's checkpoint.

    Attributes:
        judge: what was compared: ``gate`` for the gate at a restore, ``rehearsal`` for a rehearsal, ``death`` for a
            repetition of the steps that dead ranks had trained after the checkpoint.
        result: ``passed``, ``refused``, or ``damaged`` if the checkpoint's bytes are not the committed bytes.
        commit: the commit's number.
        took_s: the seconds that the check took; for the gate, including the restore.
    """

    judge: Literal["gate", "rehearsal", "death"]
    result: Literal["passed", "refused", "damaged"]
    commit: int
    took_s: float


@dataclass(frozen=True)
class AttemptView:
    """A read-only view of an attempt for its observers, which can't open, stop or end the attempt.

    Attributes:
        number: the attempt's number.
        head: the commit that the run continues from; None before the first commit.
        step: the newest step whose checkpoint is durable, committed or not.
        total_steps: the number of steps of the whole run; 0 if the ranks haven't built the recipe.
        built: the ranks' description of the training that they have built; None if they haven't built the recipe.
        read_beats: returns the heartbeat of each rank of this machine, by rank; may be called from any thread.
    """

    config: RunConfig
    journal: Journal
    number: int
    head: Commit | None
    step: int
    total_steps: int
    built: Ready | None
    read_beats: Callable[[], Mapping[int, Beat]] = dict

    @property
    def is_complete(self) -> bool:
        return self.built is not None and self.step >= self.total_steps


class Observer:
    """Base class of observers; override the methods that you need.

    The attempt's own thread calls each method, so keep them quick: commits and deadlines wait for them. If a method
    raises an error, the attempt logs a warning and continues.
    """

    def opened(self, attempt: AttemptView) -> None:
        """Called when the ranks hold the state from which training begins."""

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        """Called each time that the ranks report a step, every ``log.every`` steps."""

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        """Called after each commit, whether of a chunk, of a stop or of an adopted checkpoint."""

    def judged(self, attempt: AttemptView, verdict: CheckpointVerdict) -> None:
        """Called when a commit's checkpoint has passed or failed a comparison; see `CheckpointVerdict`."""

    def failed(self, attempt: AttemptView, error: HoldfastError) -> None:
        """Called when the ranks have ended with an error. New ranks may replace them."""

    def ended(self, attempt: AttemptView) -> None:
        """Called once, when the ranks have ended, even if the attempt couldn't be opened."""


def judge_restore(error: HoldfastError | None, commit: Commit, began: float) -> CheckpointVerdict:
    """Return the gate's verdict on a commit after its restore.

    Args:
        error: why the commit wasn't restored; None if it was restored.
        began: when the restore began, on the clock of `time.monotonic`.
    """
    result: Literal["refused", "damaged"] = "refused" if isinstance(error, GateTripped | StateError) else "damaged"
    return CheckpointVerdict("gate", result if error else "passed", commit.number, time.monotonic() - began)


def make_observers(config: RunConfig) -> list[Observer]:
    """Return the observers that ``log.observers`` names as ``module:Class``, and those of the extensions.

    Raises:
        ConfigError: an observer can't be imported, or isn't an allowed class; an extension's settings are wrong.
    """
    check_tables(config)
    named = [import_class("log.observers", name, Observer)() for name in config.log.observers]
    return named + [observer for _, made in call_all("observers", config) for observer in made]


class Observers:
    """Several observers, which are called in their order. If an observer fails, the others are still called."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._warned: set[str] = set()

    def tell(self, what: str, attempt: AttemptView, *arguments: Any) -> None:
        """Call the method named ``what`` of each observer. Log each failure once."""
        for observer in self._observers:
            try:
                getattr(observer, what)(attempt, *arguments)
            except Exception as error:  # a broken observer must not end a run
                warning = f"{type(observer).__name__}.{what} failed: {error or repr(error)}; the run continues"
                if warning not in self._warned:
                    log.warning("%s", warning)
                self._warned.add(warning)
