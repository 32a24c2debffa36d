"""A run's whole life in one process: open the run, train and commit its chunks, stop in time, record the ending."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from holdfast.attempt.attempt import Attempt
from holdfast.attempt.commits import Publish, publish_commit
from holdfast.attempt.observers import Observer, make_observers
from holdfast.attempt.pipeline import Chunk
from holdfast.checkpoint import Saved
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, OutOfMemory, RankDied
from holdfast.extending import call_all, find_disruption
from holdfast.journal import Journal
from holdfast.journal.endings import TOLD_BY_A_SIGNAL, Ending, ending_of
from holdfast.ledger.standing import Outcome, TrainResult, read_standing, stopped_early
from holdfast.machine.preemption import Notice, Source, find_sources, watch
from holdfast.rank.launchers import refuse_launcher
from holdfast.store import open_store
from holdfast.terminal import interrupt

log = logging.getLogger(__name__)

# How often opening a run or training a chunk is retried, with new ranks each time, after the ranks have failed.
RETRIES = 2
RETRY_AFTER_S = 1.0

# The cause of an attempt's end: a notice, an error, a signal handler's exception, or None for a complete run.
Cause = Notice | BaseException | None

T = TypeVar("T")


def opens_again(error: object) -> bool:
    """Return whether to retry opening a run in new ranks after this error, and log the retry.

    There is no retry if the recipe's code failed.
    """
    return isinstance(error, RankDied | OutOfMemory) and _log_retry(error, "new ranks replace these ranks")


def trains_again(error: object) -> bool:
    """Return whether to train a chunk again in new ranks after this error, and log the retry."""
    if not isinstance(error, HoldfastError) or not error.is_retryable:
        return False
    return _log_retry(error, "new ranks continue from the last commit")


def _log_retry(error: HoldfastError, next_step: str) -> Literal[True]:
    hint = f" ({error.hint})" if error.hint else ""
    log.warning("%s; %s%s", error, next_step, hint)
    return True


def open_attempt(attempt: Attempt) -> None:
    """Open an attempt; if its ranks die, retry with new ranks. See `Attempt.open`."""
    _retry(attempt.open, opens_again)


def train_in_ranks(attempt: Attempt, chunk: Chunk) -> Saved | None:
    """Train a chunk; retry it in new ranks if the error is retryable. See `Attempt.train_chunk`."""
    return _retry(lambda: attempt.train_chunk(chunk), trains_again)


def _retry(call: Callable[[], T], calls_again: Callable[[object], bool]) -> T:
    """Return a call's result. Repeat the call after an error for which ``calls_again`` returns True.

    After `RETRIES` repetitions, raise the error.
    """
    for _ in range(RETRIES):
        try:
            return call()
        except HoldfastError as error:
            if not calls_again(error):
                raise
            time.sleep(RETRY_AFTER_S)
    return call()


@dataclass(frozen=True)
class Acts:
    """The functions with which `live` opens a run, trains a chunk and commits. Prefect's flow passes its tasks."""

    open: Callable[[Attempt], None] = open_attempt
    train_chunk: Callable[[Attempt, Chunk], Saved | None] = train_in_ranks
    publish: Publish = publish_commit


def find_ending(cause: Cause) -> Ending:
    """Return the ending of an attempt by its cause.

    A signal, lost ranks or a failing store may have one common cause: the platform takes the machine away. If an
    extension says so, the attempt was preempted. Call this after the last save and commit, because it may ask the
    platform.
    """
    ending = Ending("preempted", cause.reason) if isinstance(cause, Notice) else ending_of(cause)
    is_signal = ending == TOLD_BY_A_SIGNAL
    if not (is_signal or ending.row.is_loss or ending.reason == "store_failed"):
        return ending
    disruption = find_disruption()
    if not disruption:
        return ending
    return Ending("preempted", disruption + ("" if is_signal else f"; {ending}"))


def live(
    config: RunConfig,
    observers: Sequence[Observer] = (),
    acts: Acts = Acts(),
    *,
    number: int | None = None,
    sources: Sequence[Source] = (),
    find_ending: Callable[[Cause], Ending] = find_ending,
) -> Outcome:
    """Train a run from the newest commit in its journal, until the run is complete or this process is told to end.

    Two things tell the process to end: a notice, or a signal whose handler raises an exception that isn't an
    `Exception`, such as SystemExit. The attempt then saves and commits the trained steps. However it ends, it records
    its ending and leaves no rank behind. An attempt sends each commit to the run's metric sinks and observers
    (``log.sinks`` and ``log.observers``), exports metrics as ``log.metrics`` says, and keeps the run's report up to
    date.

    Args:
        observers: objects that are told of each step and commit; see `Observer`.
        acts: the functions that open the run, train and commit. Prefect's flow passes its tasks here.
        number: the attempt's number; the next free number if None.
        sources: further sources of preemption notices, besides clouds and the drain file.
        find_ending: returns, for the cause of the attempt's end, the ending to record.

    Raises:
        ConfigError: another launcher has started several processes, each of which would train the run.
        HoldfastError: the run can't be opened, trained or committed.
        BaseException: the exception of a signal handler, raised after the trained steps are committed. If that commit
            completes the run, nothing is raised.
    """
    # Prefect's flow passes its own functions, and starts the attempt in one process only
    if acts == Acts():
        refuse_launcher(config.compute)
    ending, attempt = TOLD_BY_A_SIGNAL, None  # recorded if a second signal arrives before `find_ending` returns
    try:
        attempt = Attempt(config, number, [*observers, *make_observers(config)], acts.publish)
        _train(attempt, acts, sources)
        ending = find_ending(attempt.notice)
        return _describe(attempt)
    except BaseException as error:
        ending = find_ending(error)
        raise
    finally:
        if attempt is not None:
            attempt.end(ending)


@contextlib.contextmanager
def surrounded(config: RunConfig) -> Iterator[None]:
    """Enter what extensions have around an attempt, such as the requeueing of a job.

    Use this context manager on node 0 alone, because other nodes don't know why the attempt ended.

    Raises:
        ConfigError: an extension can't be imported, or its settings are wrong.
    """
    with contextlib.ExitStack() as entered:
        for _, each in call_all("around", config):
            entered.enter_context(each)
        yield


def _train(attempt: Attempt, acts: Acts, sources: Sequence[Source]) -> None:
    try:
        acts.open(attempt)
        with watch([*find_sources(attempt.config.resume.drain_file), *sources], attempt.notify):
            while (chunk := attempt.next_chunk()) is not None:
                saved = acts.train_chunk(attempt, chunk)
                if saved is not None:
                    attempt.commit(saved)
                interrupt.raise_if_lost()
    except Exception:
        raise
    except BaseException:  # an exception that a signal handler has raised
        attempt.stop()
        if not attempt.finish_stopped():
            raise


def train(
    config: RunConfig,
    observers: Sequence[Observer] = (),
    acts: Acts = Acts(),
    *,
    sources: Sequence[Source] = (),
    find_ending: Callable[[Cause], Ending] = find_ending,
) -> TrainResult:
    """Train a run as `live` does, and return the result that a command shows.

    After a first signal, ignore further signals for ``resume.stop_within_s`` seconds.

    Raises:
        RunStopped: the attempt ended before the run is complete.
        HoldfastError: see `live`.
    """
    journal = Journal(open_store(config.store), config.run)
    newest = journal.newest()
    with interrupt.raised_once(config.resume.stop_within_s):
        outcome = live(config, observers, acts, sources=sources, find_ending=find_ending)
    result = TrainResult.of(read_standing(journal), outcome, newest.epoch if newest else None)
    if not result.complete:
        raise stopped_early(config.run)
    return result


def _describe(attempt: Attempt) -> Outcome:
    report = attempt.upkeep.read_report()
    return Outcome(complete=attempt.is_complete, retention=report.model_dump(mode="json") if report else {})
