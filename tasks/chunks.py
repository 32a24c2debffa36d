"""The tasks of an attempt: open the run, train a chunk, commit it.

Called directly, never submitted: only then is a task's body interrupted when the process is told to end. Their results
are never cached or looked up: where a run continues is decided by its journal alone.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.attempt import Attempt, Chunk
from holdfast.attempt.hooks import Proposal
from holdfast.checkpoint import Saved
from holdfast.journal import Commit
from tasks import hooks

CHUNK_RETRIES = 2


@task(task_run_name="open attempt {attempt.number}", cache_policy=NO_CACHE)
def open_run(attempt: Attempt) -> None:
    """Start the ranks, claim the attempt and find where the run continues.

    Args:
        attempt: The attempt, which the flow owns: it ends the ranks, however this ends.
    """
    attempt.open()


@task(
    task_run_name="{chunk}",
    cache_policy=NO_CACHE,
    retries=CHUNK_RETRIES,
    retry_delay_seconds=1,
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
    hooks.guard_fingerprint(attempt, proposal)
    hooks.hash_checkpoint(attempt, proposal)
    return hooks.publish_latest(attempt, proposal)


def commit(attempt: Attempt, proposal: Proposal) -> Commit:
    """Make a commit, whoever asks for it: a chunk, a stop, an adoption. See `tasks.hooks`.

    While the attempt stops it is no task, but the same call: Prefect begins no task in a flow run that is suspended.
    """
    make = commit_chunk.fn if attempt.is_stopping else commit_chunk
    return make(attempt, proposal)
