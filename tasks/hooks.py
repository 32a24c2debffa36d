"""Prefect's additions to a chunk and a commit: retries, final states and events.

==========================  ===================================================================  =====================
around a commit             in this order                                                        if it fails
==========================  ===================================================================  =====================
`publish_commit`, a task    fingerprint, hashes, the commit's record, latest.json                the task fails
observers, at once          the commit's line, `tasks.reporting.ArtifactReport`, `CommitEvents`  a warning
`Attempt.upkeep`            read the checkpoint back, prune the epochs                           a warning
==========================  ===================================================================  =====================

A task that fails is tried again if `should_open_again`, `should_train_again` or `is_about_the_store` says so.
"""

import logging
from typing import Any

from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Cancelled, Completed, Failed

from holdfast.attempt import AttemptView, Observer, opens_again, trains_again
from holdfast.errors import StoreDenied, StoreError
from holdfast.journal import Commit
from holdfast.journal.endings import Ending

# Prefect logs eight lines for each chunk, which say no more than one line of `holdfast.attempt.progress.CommitLines`.
logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)

COMMIT_EVENT = "holdfast.commit"


class CommitEvents(Observer):
    """An observer that emits each commit as an event, to which your own automations can react."""

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        run = f"{attempt.journal.store_url}/{attempt.journal.run}"
        facts = commit.model_dump(include={"number", "step", "epoch", "path", "checkpoint_sha256", "metrics", "why"})
        emit_event(COMMIT_EVENT, {"prefect.resource.id": f"holdfast.run.{run}", "holdfast.run": run}, payload=facts)


def final_state(ending: Ending) -> State[Any]:
    """Return the final state of an attempt on a work pool, named after its reason.

    An attempt that was told to end completes. An attempt that a person cancelled is Cancelled, as on the server.
    """
    message = ending.message or None
    if ending.row.state == "Cancelled":
        return Cancelled(message=message)
    state = Completed if ending.row.state == "Completed" else Failed
    return state(name=ending.reason.replace("_", " ").capitalize(), message=message)


def should_open_again(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether new ranks can open the run: True after a rank's death, False if the recipe's own code failed."""
    return opens_again(_error_of(state))


def should_train_again(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether new ranks can train the chunk: True after a rank's death; False after drift or a lost fence."""
    return trains_again(_error_of(state))


def is_about_the_store(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether a retry may help because the store failed, other than by denying access."""
    error = _error_of(state)
    return isinstance(error, StoreError) and not isinstance(error, StoreDenied)


def _error_of(state: Any) -> Any:
    return state.data if isinstance(state.data, BaseException) else state.result(raise_on_failure=False)
