"""Observers of an attempt: a bar on the terminal, a table in Prefect's UI, a metric sink of your own."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.journal import Commit
from holdfast.rank.messages import Progress

if TYPE_CHECKING:
    from holdfast.attempt.attempt import Attempt

log = logging.getLogger(__name__)


class Observer:
    """Base class of observers; override the methods that you need.

    The attempt calls each method in its own thread, so keep them quick: commits and deadlines wait for them. If one
    raises an error, the attempt logs a warning and goes on.
    """

    def opened(self, attempt: "Attempt") -> None:
        """Called when the ranks hold the state that training begins with."""

    def progressed(self, attempt: "Attempt", progress: Progress) -> None:
        """Called when the ranks have reported a step, every ``log.every`` steps."""

    def committed(self, attempt: "Attempt", commit: Commit) -> None:
        """Called after each commit, be it of a chunk, of a stop or of an adopted checkpoint."""

    def ended(self, attempt: "Attempt") -> None:
        """Called once, when the ranks have ended; also if opening has failed."""


class Observers:
    """Calls several observers in their order; the failure of one doesn't keep the others from being called."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._warned: set[str] = set()

    def tell(self, what: str, attempt: "Attempt", *arguments: Any) -> None:
        """Call the method named ``what`` of each observer; log the same failure once."""
        for observer in self._observers:
            try:
                getattr(observer, what)(attempt, *arguments)
            except Exception as error:  # a broken observer must not end a run
                warning = f"{type(observer).__name__}.{what} failed: {error or repr(error)}; the run goes on"
                if warning not in self._warned:
                    log.warning("%s", warning)
                self._warned.add(warning)
