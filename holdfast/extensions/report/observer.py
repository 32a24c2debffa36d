"""An observer that keeps the report in a run's folder up to date, while the run trains and at the attempt's end."""

import contextlib
import contextvars
import logging
import threading
import time
from typing import TYPE_CHECKING

from holdfast.attempt.observers import AttemptView, Observer
from holdfast.config import RunConfig
from holdfast.errors import NameMissing, Superseded
from holdfast.journal import REPORT, Commit, Journal, record_name
from holdfast.memory.priority import Priority
from holdfast.store import open_store

if TYPE_CHECKING:  # imported later, because the module imports numpy, which would delay the attempt's start
    from holdfast.extensions.report.publishing import Publisher

log = logging.getLogger(__name__)

# The longest wait for the report when a run is complete, and when an attempt is stopped. After a stop the wait is
# shorter, because the next attempt writes the report again.
COMPLETE_WITHIN_S = 10.0
STOPPED_WITHIN_S = 3.0


def make_reporting(config: RunConfig) -> list[Observer]:
    """Return the observer that writes the report; an empty list if ``log.report_every_s`` is 0."""
    return [Reporting(config)] if config.log.report_every_s else []


class Reporting(Observer):
    """Writes the run's ``report.html``: after a commit, at most once in ``log.report_every_s`` seconds, and at the end.

    A thread of the lowest priority reads the new records on the store and writes the page. It doesn't delay training,
    because the ranks are other processes and only the end of the attempt waits for the thread.
    """

    def __init__(self, config: RunConfig) -> None:
        self._every_s = config.log.report_every_s
        self._config = config
        self._news, self._ends = threading.Event(), threading.Event()
        self._attempt = 0
        self._has_warned = self._is_left = False
        self._next_at = time.monotonic() + self._every_s
        # The thread runs in this thread's context, so that Prefect shows its warnings with the attempt's flow run.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="report", daemon=True)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        self._tell(attempt)

    def ended(self, attempt: AttemptView) -> None:
        if not _is_due(attempt):
            return
        self._ends.set()
        self._tell(attempt)
        self._thread.join(COMPLETE_WITHIN_S if attempt.head and attempt.is_complete else STOPPED_WITHIN_S)
        self._is_left = True

    def _tell(self, attempt: AttemptView) -> None:
        self._attempt = attempt.number
        self._news.set()
        if self._thread.ident is None:  # not started in __init__, because nothing ends the thread if no attempt is made
            self._thread.start()

    def _run(self) -> None:
        """Write the report after each commit until the attempt has ended. This is the thread's body."""
        from holdfast.extensions.report.publishing import Publisher

        Priority().lower()
        publisher = Publisher(Journal(open_store(self._config.store), self._config.run))
        is_last = False
        while not is_last:
            self._news.wait()
            self._ends.wait(self._next_at - time.monotonic())
            self._news.clear()
            is_last = self._ends.is_set()
            self._publish(publisher)
            self._next_at = time.monotonic() + self._every_s

    def _publish(self, publisher: "Publisher") -> None:
        try:
            publisher.publish(self._attempt)
        except Superseded:
            pass  # a later attempt owns the run, and writes the report
        except Exception as error:  # a report must not end a run
            # The report also fails if the process ends while this thread still works ("cannot schedule new
            # futures after shutdown"). Don't warn of that.
            if not self._has_warned and not self._is_left:
                log.warning("the report can't be written: %s; the run continues", error or repr(error))
            self._has_warned = True


def _is_due(attempt: AttemptView) -> bool:
    """Return whether an attempt that ends has to write the report.

    An attempt that found the run complete hasn't claimed the run. It writes the report only if the last attempt died
    before it had written the report.
    """
    journal = attempt.journal
    if journal.has_attempt(attempt.number):
        return True
    if attempt.head is None or not attempt.is_complete:
        return False  # the attempt couldn't open the run, so there is nothing to report
    with contextlib.suppress(NameMissing):
        ended_at = journal.store.modified(record_name("endings", journal.attempts()))
        return journal.store.modified(REPORT) <= ended_at
    return True
