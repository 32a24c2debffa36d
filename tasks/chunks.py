"""The tasks of an attempt: open the run, train a chunk, commit it.

Call these tasks directly, never `.submit()` them: Prefect interrupts only the body of a directly called task when it
tells the process to end. No task caches or stores its result, even if the user's Prefect profile says otherwise: the
journal alone decides where a run continues.
"""

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from holdfast.attempt import RETRIES, RETRY_AFTER_S, Acts, Attempt, Chunk, Line, Proposal, publish_commit
from holdfast.checkpoint import Saved
from holdfast.journal import Commit
from tasks import hooks

P = ParamSpec("P")
R = TypeVar("R")

UNSTORED: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
RETRIED: dict[str, Any] = {"retries": RETRIES, "retry_delay_seconds": RETRY_AFTER_S, **UNSTORED}


def stoppable(body: Callable[P, R]) -> Callable[P, R | State[Any]]:
    """Wrap a task's body. If the process is told to end meanwhile, the task is Cancelled; Prefect would log a crash."""

    @functools.wraps(body)
    def stopped(*arguments: P.args, **named: P.kwargs) -> R | State[Any]:
        try:
            return body(*arguments, **named)
        except TerminationSignal:
            return Cancelled(message="told to end: the attempt saves what is trained")

    return stopped


def uncover(call: Callable[P, R | State[Any]]) -> Callable[P, R]:
    """Wrap a task's function. If a signal has ended the task, raise the signal's exception, even if an error hides it.

    If the signal comes while Prefect is starting a task, Prefect 3.9.1 raises ``ValueError: Task run is not set`` while
    it handles SIGTERM or Ctrl-C. Without the wrapper, the attempt would end as failed and save nothing.
    """

    @functools.wraps(call)
    def uncovered(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            found = call(*arguments, **named)
        except Exception as error:
            for each in _list_contexts(error):
                if isinstance(each, TerminationSignal | KeyboardInterrupt):
                    raise each from None
            raise
        if isinstance(found, State):
            raise TerminationSignal(signal=signal.SIGTERM)
        return found

    return uncovered


def _list_contexts(error: BaseException) -> Iterator[BaseException]:
    """Yield an error's contexts: the error during whose handling it was raised, that error's own context, and so on."""
    context = error.__context__
    while context is not None:
        yield context
        context = context.__context__


@task(task_run_name="open attempt {attempt.number}", retry_condition_fn=hooks.should_open_again, **RETRIED)
@stoppable
def open_run(attempt: Attempt) -> None:
    """Start the ranks, claim the attempt and find where the run continues. A retry continues in new ranks.

    Args:
        attempt: The attempt to open. The attempt ends its ranks itself, even if this task fails.
    """
    attempt.open()


@task(task_run_name="{chunk}", retry_condition_fn=hooks.should_train_again, **RETRIED)
@stoppable
def train_chunk(attempt: Attempt, chunk: Chunk) -> Saved | None:
    """Train a chunk and return its durable checkpoint. The checkpoint doesn't count until it is committed.

    A retry begins at the last verified checkpoint. If this is already the chunk's own checkpoint, the retry returns
    None.

    Args:
        attempt: The attempt that trains.
        chunk: The steps to train.
    """
    return attempt.train_chunk(chunk)


@task(task_run_name="commit {proposal.saved.path}", retries=0, **UNSTORED)
@stoppable
def commit_chunk(line: Line, proposal: Proposal) -> Commit:
    """Commit a checkpoint, so that it counts, while the ranks already train the next chunk.

    Args:
        line: The run's chain of commits, which the attempt extends.
        proposal: The checkpoint, and the reason for the commit.
    """
    return publish_commit(line, proposal)


def publish(line: Line, proposal: Proposal) -> Commit:
    """Commit a checkpoint of a chunk or a stop, or one that a dead attempt has saved.

    The commit is a task of Prefect, except if the attempt is stopping: Prefect starts no task in a paused flow run.
    """
    return publish_commit(line, proposal) if proposal.is_urgent else uncover(commit_chunk)(line, proposal)


ACTS = Acts(uncover(open_run), uncover(train_chunk), publish)
