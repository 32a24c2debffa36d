"""The tasks of an attempt: open the run, train a chunk, commit it.

Called directly, never submitted: only then is a task's body interrupted when the process is told to end. Their results
are never cached or looked up: where a run continues is decided by its journal alone.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.attempt import Attempt, Chunk
from holdfast.checkpoint import Saved
from holdfast.config import RunConfig
from holdfast.journal import Commit
from tasks import hooks

CHUNK_RETRIES = 2


@task(task_run_name="open attempt {number}", cache_policy=NO_CACHE)
def open_run(config: RunConfig, number: int) -> Attempt:
    """Start the ranks, claim the attempt and find where the run continues.

    Args:
        config: The run's configuration.
        number: The attempt's number, its fencing token.
    """
    attempt = Attempt(config, number)
    try:
        attempt.open()
    except BaseException:
        attempt.close()
        raise
    return attempt


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


@task(task_run_name="commit {saved.path}", cache_policy=NO_CACHE)
def commit_chunk(attempt: Attempt, saved: Saved) -> Commit:
    """Make a checkpoint count, while the ranks already train the next chunk.

    Args:
        attempt: The attempt that trained it.
        saved: The checkpoint.
    """
    hooks.guard_fingerprint(attempt, saved)
    hooks.hash_checkpoint(attempt, saved)
    return hooks.publish_latest(attempt, saved)
