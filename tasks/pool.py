"""Attempts as flow runs on a work pool: start each attempt once, watch it, and cancel it.

Only the journal says what a run's attempts have done. The server says only whether an attempt has ended. `await_end`
also watches the heartbeats of a flow run (`tasks.liveness`), so that it doesn't wait for a dead process.
"""

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Crashed

from holdfast.config import RunConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.journal import Journal
from holdfast.store import open_store
from tasks.asking import ask_server
from tasks.heartbeat import BEAT_LABEL, is_called_vanished
from tasks.liveness import EVERY_S, EVERY_VARIABLE, ProcessVerdict, ProcessWatch
from tasks.own_run import RECENT, own_flow_run, raise_if_paused
from tasks.states import describe_wait, is_final, kind_of, state_of_lost

log = logging.getLogger("holdfast.pool")

# Seconds between two readings of a watched state: while the state is new, and later. Reading each attempt twice a
# second all the time made up more than half of all requests to the server.
POLL_EVERY_S, WATCH_EVERY_S = 0.5, 2 / 3 * EVERY_S
NEW_FOR_S = 10.0
LOG_WAIT_AFTER_S = 10.0
NEWEST_FLOW_RUNS = 50


def tag_of(config: RunConfig) -> str:
    """Return the tag of all flow runs of a run."""
    return f"run:{config.run}"


def tag_run(config: RunConfig) -> None:
    """Tag the current flow run with the name of the run that it trains."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    add_tags(context.flow_run.id, tag_of(config))


def start_attempt(
    config: RunConfig, number: int, again: int = 0, environment: Mapping[str, str] | None = None
) -> FlowRun:
    """Return the flow run of an attempt. Start one if none was started yet.

    Args:
        number: the attempt's number.
        again: the number of flow runs for this number that have ended before they claimed it.
        environment: environment variables for the flow run's process, besides the variables of the pool.

    Raises:
        ConfigError: there is no deployment for the work pool.
    """
    key = f"{config.store}/{config.run}:{number}"
    # An attempt has to send heartbeats as often as this process, its watcher, expects them.
    agreed = {EVERY_VARIABLE: f"{EVERY_S:g}"}  # the worker's environment may set another interval
    while True:
        try:
            flow_run = _start(
                f"attempt/{config.where}",
                f"{config.run} attempt {number}",
                f"{key}.{again}" if again else key,
                config,
                {**agreed, **(environment or {})},
                number=number,
            )
        except ObjectNotFound:
            raise ConfigError(
                f'where = "{config.where}": Prefect\'s server has no deployment attempt/{config.where}',
                hint="`make up` creates one on this machine; deployments/prefect.yaml lists all deployments",
            ) from None
        if not flow_run.state or not flow_run.state.is_final():
            return flow_run
        # The flow run with this key has ended: it belongs to a deleted run, or it never claimed the number.
        again += 1


def start_train(config: RunConfig, key: str) -> FlowRun:
    """Return a flow run of `train` for a run. Start one, unless this key has already started one.

    Args:
        key: a text that the caller repeats to get the same flow run again.
    """
    return _start("train/train", config.run, key, config, {})


def _start(
    deployment: str, name: str, key: str, config: RunConfig, environment: Mapping[str, str], **parameters: Any
) -> FlowRun:
    def start(client: SyncPrefectClient) -> FlowRun:
        flow_run = run_deployment(
            deployment,
            parameters={"config": config.model_dump(mode="json"), **parameters},
            flow_run_name=name,
            tags=[tag_of(config)],
            idempotency_key=key,
            job_variables={"env": dict(environment)} if environment else None,
            timeout=0,
        )
        assert isinstance(flow_run, FlowRun)
        return flow_run

    return ask_server(start)


def refresh(flow_run: FlowRun, watch: ProcessWatch) -> FlowRun:
    """Read a flow run from the server and return it. If it is lost, first set its state to Crashed or Cancelled.

    If the state says that the flow run has vanished, but its process has just sent a heartbeat, wait for one of two
    events: the process corrects the state, or sends no more heartbeats.

    Args:
        watch: the memory of earlier calls for this flow run; pass the same object each time.
    """
    while True:
        try:
            found = ask_server(lambda client: _read_with_own(client, flow_run.id))
        except ObjectNotFound:
            # The server no longer knows the flow run: a person deleted it, or restored the server from a backup.
            gone: State[Any] = Crashed(name="Vanished", message="Prefect's server no longer knows this flow run")
            return flow_run.model_copy(update={"state": gone})
        state = found.state
        if state is None:
            return found
        verdict = watch.judge(kind_of(state), state.id, found.labels.get(BEAT_LABEL), time.monotonic())
        if verdict is not ProcessVerdict.ALIVE or not is_called_vanished(state):
            break
        time.sleep(POLL_EVERY_S)
    if verdict is not ProcessVerdict.LOST:
        return found
    lost = state_of_lost(state, watch.silent_s)
    log.warning("the flow run %s is in the state %s, but its process is lost: %s", found.name, state.name, lost.message)
    ask_server(lambda client: client.set_flow_run_state(found.id, lost, force=True))
    return ask_server(lambda client: client.read_flow_run(found.id))


def _read_with_own(client: SyncPrefectClient, flow_run_id: UUID) -> FlowRun:
    """Return a flow run. Also read the current flow run's state in the same request, for the threads that poll it.

    Raises:
        ObjectNotFound: the server doesn't know the flow run.
    """
    own, asked_at = own_flow_run(), time.monotonic()
    if own is None:
        return client.read_flow_run(flow_run_id)
    both = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id, own.id]))
    found = {each.id: each for each in client.read_flow_runs(flow_run_filter=both)}
    if own.id in found:
        RECENT.remember(own.id, found[own.id].state, asked_at)
    if flow_run_id not in found:
        raise ObjectNotFound(KeyError(flow_run_id))
    return found[flow_run_id]


def find_live_attempt(config: RunConfig) -> FlowRun | None:
    """Return the newest attempt whose flow run the server shows as not ended; None if the server shows all as ended.

    The attempt's process may be dead; `await_end` detects this.
    """
    found = ask_server(
        lambda client: client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["attempt"])),
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag_of(config)])),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=NEWEST_FLOW_RUNS,
        )
    )
    # an attempt of a command, which has no deployment, sends no heartbeats
    workers = (each for each in found if each.deployment_id is not None)
    own = (each for each in workers if each.parameters.get("config", {}).get("store") == config.store)
    return next((each for each in own if not is_final(each)), None)


class Pace:
    """The polling interval of watched states: short while a state is new, longer later."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = -math.inf

    def choose(self, states: object, now: float) -> float:
        """Return the seconds until the next reading.

        Args:
            states: the ids of the states that were just read; any change of a state changes them.
            now: the time on the monotonic clock.
        """
        if states != self._seen:
            self._seen, self._since = states, now
        return POLL_EVERY_S if now - self._since < NEW_FOR_S else WATCH_EVERY_S


def await_end(flow_run: FlowRun) -> FlowRun:
    """Wait until a flow run has ended or is lost, and return it. If the flow run itself has to wait, log why.

    Raises:
        Pause: a person paused the current flow run, in which this call waits.
    """
    watch, logged, pace = ProcessWatch(), "", Pace()
    began, checked_at = time.monotonic(), -math.inf
    while not is_final(found := refresh(flow_run, watch)):
        waits_for = describe_wait(found)
        if waits_for not in ("", logged) and time.monotonic() - began > LOG_WAIT_AFTER_S:
            log.info("%s", waits_for)
            logged = waits_for
        if time.monotonic() - checked_at >= WATCH_EVERY_S:
            raise_if_paused()
            checked_at = time.monotonic()
        time.sleep(pace.choose(found.state and found.state.id, time.monotonic()))
    return found


def choose_number(config: RunConfig, number: int) -> int:
    """Return the attempt's number for the current flow run: a new number if the flow run was paused and is now resumed.

    Raises:
        RunStopped: a person retries a flow run whose attempt has already begun. A new attempt must continue the run,
            because the earlier attempt's process may still be alive.
    """
    journal = Journal(open_store(config.store), config.run)
    newest = journal.attempts()
    if was_paused(journal, number) and journal.read_ending(newest) is not None:
        return newest + 1
    context = FlowRunContext.get()
    is_retried = context is not None and context.flow_run is not None and context.flow_run.run_count > 1
    if is_retried and journal.has_attempt(number):
        raise RunStopped(
            f"attempt {number} of run {config.run!r} can't begin a second time",
            hint="start or retry the flow train, which continues the run with a new attempt",
        )
    return number


def was_paused(journal: Journal, number: int) -> bool:
    """Return whether an attempt ended because a person paused it."""
    ending = journal.read_ending(number)
    return ending is not None and ending.reason == "paused"


def cancel(flow_run: FlowRun, within_s: float) -> None:
    """Cancel a flow run, so that it saves and ends. Wait at most `within_s` seconds until it has ended or is lost."""
    with contextlib.suppress(ObjectNotFound):
        ask_server(lambda client: client.set_flow_run_state(flow_run.id, Cancelling()))
    watch, deadline = ProcessWatch(), time.monotonic() + within_s
    while not is_final(refresh(flow_run, watch)) and time.monotonic() < deadline:
        time.sleep(POLL_EVERY_S)


def end_tasks(flow_run: FlowRun) -> None:
    """Set the tasks of a dead flow run to Crashed. Otherwise the task of its chunk would stay Running forever.

    If the server refuses, do nothing, because nothing depends on these states.
    """

    def end(client: SyncPrefectClient) -> None:
        running = TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING]))
        of_it = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
        for task in client.read_task_runs(flow_run_filter=of_it, task_run_filter=TaskRunFilter(state=running)):
            client.set_task_run_state(task.id, Crashed(message=f"{flow_run.name} is gone"), force=True)

    with contextlib.suppress(ObjectNotFound, httpx.HTTPStatusError):
        ask_server(end)


def add_tags(flow_run_id: Any, *tags: str) -> None:
    """Add tags to a flow run, if the server still knows it."""

    def add(client: SyncPrefectClient) -> None:
        known = client.read_flow_run(flow_run_id).tags
        client.update_flow_run(flow_run_id, tags=sorted({*known, *tags}))

    with contextlib.suppress(ObjectNotFound):
        ask_server(add)
