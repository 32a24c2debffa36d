"""What happens around a commit, as one list, whoever makes it: a chunk, a stop, a notice, an adoption.

=====================  ================================================  ===========================
inside its task        `guard_fingerprint`, `hash_checkpoint`,           their failure fails the task
                       `publish_latest`, in this order
after it, at once      `announce`, what shows the commit in Prefect's    their failure is a warning
                       UI, `emit`
after that, upkeep     `read_back`, `prune_epochs`                       their failure is a warning
when a task fails      `should_retry`, `is_about_the_store`
=====================  ================================================  ===========================

Upkeep may take long, and a process that was told to end is killed when its time is up. So an attempt that stops leaves
upkeep to the next one, which does it while its ranks train their first chunk. Reading back is then not needed any more:
the next attempt hashes every byte of the checkpoint that it continues from.
"""

import logging
from collections.abc import Callable
from typing import Any

from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Cancelled, Completed, Failed

from holdfast import checkpoint
from holdfast.attempt import Attempt, Hooks
from holdfast.attempt.hooks import Proposal
from holdfast.errors import ConfigDrift, HoldfastError, StoreDenied, StoreError
from holdfast.journal import Commit
from holdfast.supervision import End

# Prefect sends the records of this logger to its server (pyproject.toml, extra_loggers) but leaves its level alone.
logging.getLogger("holdfast").setLevel(logging.INFO)
# Eight lines of Prefect's a chunk say no more than the one of `announce`.
logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)

log = logging.getLogger("holdfast.hooks")

COMMIT_EVENT = "holdfast.commit"


def guard_fingerprint(attempt: Attempt, proposal: Proposal) -> None:
    """Return if the checkpoint was trained with the run's settings.

    An adopted one may have been trained with those of the commit before it, if a change was let through since.

    Raises:
        ConfigDrift: it was not.
    """
    saved, current = proposal.saved, attempt.fingerprint
    trained_with = saved.metadata.config_fingerprint
    if trained_with not in (attempt.line.fingerprints() if proposal.why == "adopted" else {current}):
        raise ConfigDrift(f"{saved.path} was trained with settings {trained_with[:16]}, not {current[:16]}")


def hash_checkpoint(attempt: Attempt, proposal: Proposal) -> None:
    """Check that the checkpoint's hashes, taken while it was written, are those of complete files.

    Raises:
        CheckpointDamaged: a file is missing or cut short, or the hashes contradict each other.
    """
    checkpoint.check_saved(attempt.journal.store, proposal.saved)


def publish_latest(attempt: Attempt, proposal: Proposal) -> Commit:
    """Publish the commit's record and latest.json: the last thing that a commit does.

    Raises:
        Superseded: a later attempt owns the run.
    """
    return proposal.publish()


def read_back(attempt: Attempt) -> None:
    """Read back the first commit and every tenth, or as it is configured, and compare the hashes."""
    attempt.read_back()


def prune_epochs(attempt: Attempt) -> None:
    """Delete the checkpoints that the run's retention doesn't keep."""
    attempt.prune()


def announce(attempt: Attempt) -> None:
    """Log the newest commit as one plain line."""
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
    """Send the newest commit as an event, which your own automations may act upon."""
    commit = attempt.head
    assert commit is not None
    run = f"{attempt.journal.store_url}/{attempt.journal.run}"
    facts = commit.model_dump(include={"number", "step", "epoch", "path", "checkpoint_sha256", "metrics", "why"})
    emit_event(COMMIT_EVENT, {"prefect.resource.id": f"holdfast.run.{run}", "holdfast.run": run}, payload=facts)


def around_commits(commit: Callable[[Attempt, Proposal], Commit], show_commit: Callable[[Attempt], None]) -> Hooks:
    """Return the list as an attempt takes it.

    Args:
        commit: makes a commit, as a task.
        show_commit: shows the newest commit in Prefect's UI.
    """
    return Hooks(commit=commit, notify=(announce, show_commit, emit), upkeep=(read_back, prune_epochs))


def final_state(end: End) -> State[Any]:
    """Return the state in which an attempt on a work pool ends, named by its reason. Being told to end is no failure.

    One that a person cancelled is Cancelled, as the server knows it.
    """
    if end.reason == "cancelled":
        return Cancelled(message=end.message or None)
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
