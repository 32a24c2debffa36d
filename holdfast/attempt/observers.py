"""Who watches an attempt: a bar on the terminal, a table in Prefect's UI, a metric sink of your own."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.journal import Commit
from holdfast.rank.messages import Progress

if TYPE_CHECKING:
    from holdfast.attempt.attempt import Attempt

log = logging.getLogger(__name__)


class Observer:
    """Watches an attempt; a subclass overrides what it needs.

    Each method is called in the attempt's thread, and must be quick: training and deadlines wait for it. An error that
    one raises is a warning, and the run goes on.
    """

    def opened(self, attempt: "Attempt") -> None:
        """The ranks hold the state that training begins with."""

    def progressed(self, attempt: "Attempt", progress: Progress) -> None:
        """The ranks have reported a step, as often as ``log.every`` says."""

    def committed(self, attempt: "Attempt", commit: Commit) -> None:
        """A commit counts from now on, whoever made it: a chunk, a stop, an adoption."""

    def ended(self, attempt: "Attempt") -> None:
        """No rank is left, and nothing more will be reported. Called once, also where opening has failed."""


class Observers:
    """Tells several observers the same, in their order; one that fails keeps no other from being told."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._warned: set[str] = set()

    def tell(self, what: str, attempt: "Attempt", *arguments: Any) -> None:
        """Call the method named ``what`` of each; the same failure is warned of once."""
        for observer in self._observers:
            try:
                getattr(observer, what)(attempt, *arguments)
            except Exception as error:  # what an observer does is no concern of the run's
                warning = f"{type(observer).__name__}.{what} failed: {error or repr(error)}; the run goes on"
                if warning not in self._warned:
                    log.warning("%s", warning)
                self._warned.add(warning)
