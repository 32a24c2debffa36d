"""One process life of a run, as a flow run of its own."""

from typing import Any

import tasks.untracked  # noqa: F401

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, TerminationSignal

from holdfast.attempt import Attempt
from holdfast.config import RunConfig
from holdfast.drill import strike_when_told
from holdfast.errors import HoldfastError
from holdfast.preemption import watch
from holdfast.progress import ProgressView
from holdfast.standing import Outcome
from holdfast.supervision import End, reason_of
from tasks import hooks, pool
from tasks.chunks import commit_chunk, open_run, train_chunk
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
    opened: Attempt | None = None
    end = End("completed")
    is_on_pool = pool.own_flow_run() is not None
    pool.outlive_worker()
    try:
        with heartbeat():
            opened = open_run(config, pool.number_now(config, number))
            train_chunks(opened)
        if opened.notice is not None:
            end = End("preempted", opened.notice.why)
            pool.raise_if_paused()
        return hooks.final_state(end) if is_on_pool else describe(opened)
    except (TerminationSignal, KeyboardInterrupt, Pause) as signal:
        if opened is not None:
            opened.stop()
        if isinstance(signal, Pause):
            end = End("paused", "by a person")
        elif pool.is_being_cancelled():
            end = End("cancelled", "by a person")
        else:
            end = End("preempted", "told to end by a signal")
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


def train_chunks(opened: Attempt) -> None:
    """The run is complete, or this machine goes away; all that is trained is committed."""
    signs = [pool.find_pause()]
    with (
        ProgressView(opened),
        reported(opened) as show_chunk,
        watch(opened.config.preemption, opened.notify, signs),
    ):
        strike_when_told(opened)
        commit = commit_chunk.with_options(on_completion=hooks.after_commit(opened, show_chunk))
        while (chunk := opened.next_chunk()) is not None:
            saved = train_chunk(opened, chunk)
            if saved is not None:
                commit(opened, saved)


def describe(opened: Attempt) -> Outcome:
    """How the attempt ended, for `flows.train`."""
    report = opened.read_retention_report()
    return Outcome(complete=opened.is_complete, retention=report.model_dump(mode="json") if report else {})
