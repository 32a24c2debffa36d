"""The tasks of an attempt: open the run, train a chunk, commit it.

Called directly, never submitted: only then is a task's body interrupted when the process is told to end. Their results
are never cached or looked up: where a run continues is decided by its journal alone.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.attempt import CHUNK_RETRIES, RETRY_AFTER_S, Acts, Attempt, Chunk, Proposal, publish_commit
from holdfast.checkpoint import Saved
from holdfast.journal import Commit
from tasks import hooks


@task(task_run_name="open attempt {attempt.number}", cache_policy=NO_CACHE)
def open_run(attempt: Attempt) -> None:
    """Start the ranks, claim the attempt and find where the run continues.

    Args:
        attempt: The attempt, which ends its ranks, however this ends.
    """
    attempt.open()


@task(
    task_run_name="{chunk}",
    cache_policy=NO_CACHE,
    retries=CHUNK_RETRIES,
    retry_delay_seconds=RETRY_AFTER_S,
    retry_condition_fn=hooks.should_retry,
)
def train_chunk(attempt: Attempt, chunk: Chunk) -> Saved | None:
    """Train a chunk; its checkpoint is durable and doesn't count yet. A retry begins at the last verified checkpoint,
    and returns nothing if that is the chunk's own.

    Args:
        attempt: The attempt that trains.
        chunk: The steps to train.
    """
    return attempt.train_chunk(chunk)


@task(task_run_name="commit {proposal.saved.path}", cache_policy=NO_CACHE)
def commit_chunk(attempt: Attempt, proposal: Proposal) -> Commit:
    """Make a checkpoint count, while the ranks already train the next chunk.

    Args:
        attempt: The attempt that commits it.
        proposal: The checkpoint, and why it is committed.
    """
    return publish_commit(attempt, proposal)


def publish(attempt: Attempt, proposal: Proposal) -> Commit:
    """Make a commit, whoever asks for it: a chunk, a stop, an adoption.

    While the attempt stops it is no task, but the same call: Prefect begins no task in a flow run that is suspended.
    """
    return publish_commit(attempt, proposal) if attempt.is_stopping else commit_chunk(attempt, proposal)


ACTS = Acts(open_run, train_chunk, publish)
