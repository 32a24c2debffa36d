"""Prefect's additions to a chunk and a commit: retries, final states and events.

==========================  ===================================================================  =====================
at a commit, in this order  what happens                                                         after an error
==========================  ===================================================================  =====================
`publish_commit`, a task    check fingerprint and hashes, write the record and latest.json       the task fails
observers                   print a line, call `ArtifactReport` and `CommitEvents`               a warning is logged
`Attempt.upkeep`            read the checkpoint back, delete old checkpoints                     a warning is logged
==========================  ===================================================================  =====================

A failed task is retried if its condition is true: `should_open_again`, `should_train_again` or `is_about_the_store`.
"""

import contextvars
import logging
import threading
import time
from typing import Any

from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Cancelled, Completed, Failed

from holdfast.attempt import AttemptView, Observer, opens_again, trains_again
from holdfast.config import RunConfig
from holdfast.errors import StoreDenied, StoreError
from holdfast.journal import Commit, Journal
from holdfast.journal.endings import Ending
from holdfast.store import open_store

log = logging.getLogger("holdfast.train")

# Prefect would log eight lines for each chunk. One line of `holdfast.attempt.progress.CommitLines` says as much.
logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)

COMMIT_EVENT = "holdfast.commit"
OVERDUE_EVENT = "holdfast.commit.overdue"
# A commit is overdue after this many of the usual intervals, and never before this many seconds.
OVERDUE_INTERVALS, OVERDUE_LEAST_S = 3.0, 60.0


class CommitEvents(Observer):
    """An observer that emits two kinds of events about a run: a commit was made, and the next commit is overdue.

    Your own automations can react to both. The usual interval is the time between the attempt's last two commits;
    before two commits it is the length of the last chunk.
    """

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._committed_at: float | None = None

    def opened(self, attempt: AttemptView) -> None:
        if attempt.head is not None and not attempt.is_complete:
            self._await_next(attempt, attempt.head, attempt.head.train_s + attempt.head.stall_s)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        facts = commit.model_dump(include={"number", "step", "epoch", "path", "checkpoint_sha256", "metrics", "why"})
        emit_event(COMMIT_EVENT, _name_run(attempt), payload=facts)
        now = time.monotonic()
        interval_s = now - self._committed_at if self._committed_at is not None else commit.train_s
        self._committed_at = now
        if attempt.is_complete:
            self._stop_waiting()
        else:
            self._await_next(attempt, commit, interval_s)

    def ended(self, attempt: AttemptView) -> None:
        self._stop_waiting()

    def _await_next(self, attempt: AttemptView, commit: Commit, interval_s: float) -> None:
        """Emit an event if no further commit is made in time. If the usual interval is unknown, do nothing."""
        self._stop_waiting()
        if interval_s <= 0:
            return
        within_s = max(OVERDUE_INTERVALS * interval_s, OVERDUE_LEAST_S)
        facts = {"number": commit.number, "step": commit.step, "interval_s": interval_s, "within_s": within_s}
        # Use this thread's context, because it has Prefect's settings.
        run = contextvars.copy_context().run
        self._timer = threading.Timer(
            within_s, run, (emit_event, OVERDUE_EVENT, _name_run(attempt)), {"payload": facts}
        )
        self._timer.daemon = True
        self._timer.start()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _name_run(attempt: AttemptView) -> dict[str, str]:
    """Return the labels by which Prefect's events name a run: an id, and the place of the run on its store."""
    run = f"{attempt.journal.store_url}/{attempt.journal.run}"
    return {"prefect.resource.id": f"holdfast.run.{run}", "holdfast.run": run}


def final_state(ending: Ending, config: RunConfig) -> State[Any]:
    """Return the final state of an attempt on a work pool, named after its reason.

    An attempt that was told to end is Completed. An attempt that a person cancelled is Cancelled, as on the server.
    """
    message = ending.message or None
    if ending.row.state == "Cancelled":
        return cancelled_state(config, ending.message)
    state = Completed if ending.row.state == "Completed" else Failed
    return state(name=ending.reason.replace("_", " ").capitalize(), message=message)


def cancelled_state(config: RunConfig, by: str) -> State[Any]:
    """Return the final state of a cancelled flow run, and log its message: what is saved, and how the run continues.

    Prefect would log a crash if the flow raised Prefect's signal instead. A worker may replace the state's message by
    its own, so the log has the message, too.

    Args:
        by: who has cancelled the flow run.
    """
    newest = Journal(open_store(config.store), config.run).newest()
    saved = f"step {newest.step} is saved in {newest.path}" if newest else "nothing was saved"
    message = f"cancelled {by}: {saved}; start the run again to continue"
    log.info(message)
    return Cancelled(message=message)


def should_open_again(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether new ranks can open the run: True after a rank's death, False if the recipe's own code failed."""
    return opens_again(_error_of(state))


def should_train_again(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether new ranks can train the chunk.

    True after a rank's death; False if settings or code have changed, or if a later attempt owns the run.
    """
    return trains_again(_error_of(state))


def is_about_the_store(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether a retry may help because the store failed, other than by denying access."""
    error = _error_of(state)
    return isinstance(error, StoreError) and not isinstance(error, StoreDenied)


def _error_of(state: Any) -> Any:
    return state.data if isinstance(state.data, BaseException) else state.result(raise_on_failure=False)
