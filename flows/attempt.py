"""One process life of a run, as a flow run of its own."""

from collections.abc import Sequence
from typing import Any

import tasks.untracked  # noqa: F401

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, TerminationSignal

from holdfast.attempt import Attempt
from holdfast.config import RunConfig
from holdfast.drill import strike_when_told
from holdfast.errors import HoldfastError
from holdfast.liveness import Request, is_cancel
from holdfast.preemption import Notice, Source, watch
from holdfast.progress import ProgressView
from holdfast.standing import Outcome
from holdfast.supervision import End, reason_of
from tasks import hooks, own_run, pool
from tasks.chunks import commit, open_run, train_chunk
from tasks.heartbeat import heartbeat
from tasks.reporting import reported


@flow(name="attempt", flow_run_name="{config.run} attempt {number}", retries=0)
def attempt(config: RunConfig, number: int) -> Outcome | State[Any]:
    """Train a run, chunk by chunk, from where its journal says that it stands, until it is complete.

    Told to end (SIGTERM, Ctrl-C, a cloud's notice, a person who cancels or pauses it), it saves and commits what is
    trained. On a work pool it ends in a state that says why; elsewhere its errors are raised.

    Args:
        config: The run's configuration.
        number: The attempt's number; an attempt of a higher number fences this one off.
    """
    own_run.outlive_worker()
    with heartbeat():
        return live(config, number)


def live(config: RunConfig, number: int) -> Outcome | State[Any]:
    """Train in one attempt, and record how it ended; however that is, no rank is left."""
    opened: Attempt | None = None
    end = End("stopped")
    is_on_pool = own_run.own_flow_run() is not None
    try:
        opened = Attempt(config, pool.number_now(config, number))
        request, sources = own_run.make_request(config.resume.stop_within_s)
        train(opened, sources)
        end = end_by_notice(opened.notice, request) if opened.notice else End("completed")
        return hooks.final_state(end) if is_on_pool else describe(opened)
    except Pause:
        end = End("paused", "by a person")
        raise
    except (TerminationSignal, KeyboardInterrupt):
        end = End("preempted", "told to end by a signal")
        end = end_by_signal()
        if is_on_pool and end.reason == "preempted":
            return hooks.final_state(end)
        raise
    except HoldfastError as error:
        end = End(reason_of(error), f"{error}; {error.hint}" if error.hint else str(error))
        if not is_on_pool:
            raise
        return hooks.final_state(end)
    except BaseException as error:
        end = End(reason_of(error), f"{type(error).__name__}: {error}")
        raise
    finally:
        if opened is not None:
            opened.end(end.reason, end.message)


def train(opened: Attempt, sources: Sequence[Source]) -> None:
    """Open the attempt, and train and commit until the run is complete or this process is told to end."""
    with reported(opened) as show_commit:
        opened.hooks = hooks.around_commits(commit, show_commit)
        try:
            open_run(opened)
            train_chunks(opened, sources)
        except (TerminationSignal, KeyboardInterrupt, Pause):
            opened.stop()
            raise


def train_chunks(opened: Attempt, sources: Sequence[Source]) -> None:
    """Train and commit chunk by chunk until the run is complete, or this machine goes away."""
    with (
        ProgressView(opened),
        watch(opened.config.preemption, opened.notify, sources),
    ):
        strike_when_told(opened)
        while (chunk := opened.next_chunk()) is not None:
            saved = train_chunk(opened, chunk)
            if saved is not None:
                opened.commit(saved)


def end_by_notice(notice: Notice, request: Request) -> End:
    """Return how an attempt ended that a notice has stopped.

    Raises:
        Pause: a person has paused it.
    """
    state = request.state or request.read()
    if state is not None and state.is_paused():
        raise Pause(state=state)
    return End("cancelled", "by a person") if is_cancel(state) else End("preempted", notice.why)


def end_by_signal() -> End:
    """Return how an attempt ended that a signal has stopped.

    If the server can't say whether a person cancels it, it counts as preempted here, and `flows.train` starts no other
    one where the server says so later.
    """
    is_cancelled = own_run.is_being_cancelled()
    if is_cancelled:
        return End("cancelled", "by a person")
    unknown = "; Prefect's server did not say whether a person cancels it" if is_cancelled is None else ""
    return End("preempted", f"told to end by a signal{unknown}")


def describe(opened: Attempt) -> Outcome:
    """Return how the attempt ended, for `flows.train`."""
    report = opened.read_retention_report()
    return Outcome(complete=opened.is_complete, retention=report.model_dump(mode="json") if report else {})
