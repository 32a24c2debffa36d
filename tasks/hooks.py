"""What happens around a chunk, as one list.

===================  ================================================  ===========================
inside a task        `guard_fingerprint`, `hash_checkpoint`,           their failure fails the task
                     `publish_latest`, in this order
after a commit       `announce`, what shows the chunk in Prefect's UI,  their failure is a warning
                     `emit`, `read_back`, `prune_epochs`
when a task fails    `should_retry`, `is_about_the_store`
===================  ================================================  ===========================
"""

import logging
from collections.abc import Callable
from typing import Any

from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Completed, Failed
from prefect.tasks import StateHookCallable

from holdfast import checkpoint
from holdfast.attempt import Attempt
from holdfast.checkpoint import Saved
from holdfast.errors import ConfigDrift, HoldfastError, StoreDenied, StoreError
from holdfast.journal import Commit
from holdfast.supervision import End

# Prefect sends the records of this logger to its server (pyproject.toml, extra_loggers) but leaves its level alone.
logging.getLogger("holdfast").setLevel(logging.INFO)
# Eight lines of Prefect's a chunk say no more than the one of `announce`.
logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)

log = logging.getLogger("holdfast.hooks")

COMMIT_EVENT = "holdfast.commit"


def guard_fingerprint(attempt: Attempt, saved: Saved) -> None:
    """The checkpoint was trained with the settings that the run has.

    Raises:
        ConfigDrift: it was not.
    """
    trained_with = saved.metadata.config_fingerprint
    if trained_with != attempt.fingerprint:
        raise ConfigDrift(f"{saved.path} was trained with settings {trained_with[:16]}, not {attempt.fingerprint[:16]}")


def hash_checkpoint(attempt: Attempt, saved: Saved) -> None:
    """The checkpoint's hashes, taken while it was written, are those of complete files.

    Raises:
        CheckpointDamaged: a file is missing or cut short, or the hashes contradict each other.
    """
    checkpoint.check_saved(attempt.journal.store, saved)


def publish_latest(attempt: Attempt, saved: Saved) -> Commit:
    """The commit is on record, and latest.json names it: the last thing that a commit does.

    Raises:
        Superseded: a later attempt owns the run.
    """
    return attempt.commit(saved)


def read_back(attempt: Attempt) -> None:
    """Of the first commit and every tenth, or as it is configured, the stored bytes are those that were hashed."""
    attempt.read_back()


def prune_epochs(attempt: Attempt) -> None:
    """Checkpoints that the run's retention doesn't keep are gone."""
    attempt.prune()


def announce(attempt: Attempt) -> None:
    """The commit is one plain line in the log."""
    commit = attempt.head
    assert commit is not None
    start = attempt.journal.read_commit(commit.parent).step if commit.parent else 0
    names = {"avg_loss": "loss"}
    numbers = "".join(
        f"{names.get(name, name)} {value:.4f}  " for name, value in commit.metrics.items() if value is not None
    )
    size_mb = commit.size_bytes / 1e6
    content_id = commit.checkpoint_sha256[:12]
    log.info(
        "chunk %d: steps %d-%d  %s%s  %.1f MB  %s",
        commit.number, start, commit.step, numbers, commit.path, size_mb, content_id,
    )  # fmt: skip


def emit(attempt: Attempt) -> None:
    """The commit is an event, which your own automations may act upon."""
    commit = attempt.head
    assert commit is not None
    run = f"{attempt.journal.store_url}/{attempt.journal.run}"
    facts = commit.model_dump(include={"number", "step", "epoch", "path", "checkpoint_sha256", "metrics", "why"})
    emit_event(COMMIT_EVENT, {"prefect.resource.id": f"holdfast.run.{run}", "holdfast.run": run}, payload=facts)


def after_commit(attempt: Attempt, show_chunk: Callable[[Attempt], None]) -> list[StateHookCallable]:
    """The hooks to run when a commit task is completed."""
    return [_warning_only(hook, attempt) for hook in (announce, show_chunk, emit, read_back, prune_epochs)]


def final_state(end: End) -> State[Any]:
    """The state in which an attempt on a work pool ends, named by its reason. Being told to end is no failure."""
    state = Completed if end.reason in ("completed", "preempted") else Failed
    return state(name=end.reason.replace("_", " ").capitalize(), message=end.message or None)


def should_retry(task: Any, task_run: Any, state: Any) -> bool:
    """Whether fresh processes can help: after a dead rank yes; after drift, damage or a lost fence no."""
    error = _error_of(state)
    return isinstance(error, HoldfastError) and error.is_retryable


def is_about_the_store(task: Any, task_run: Any, state: Any) -> bool:
    """Whether the storage failed, which may pass; a lacking right doesn't."""
    error = _error_of(state)
    return isinstance(error, StoreError) and not isinstance(error, StoreDenied)


def _error_of(state: Any) -> Any:
    return state.data if isinstance(state.data, BaseException) else state.result(raise_on_failure=False)


def _warning_only(hook: Callable[[Attempt], None], attempt: Attempt) -> StateHookCallable:
    def run(task: Any, task_run: Any, state: Any) -> None:
        try:
            hook(attempt)
        except (HoldfastError, OSError) as error:
            log.warning("%s failed: %s; the run goes on", hook.__name__, error)

    run.__name__ = hook.__name__
    return run
