"""Attempts as flow runs on a work pool: started once, watched, cancelled.

The server may be away for a while: what can't be asked now is asked again. What a run's attempts have done is read
from its journal alone; the server only says that one has ended.
"""

import contextlib
import contextvars
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext, SyncClientContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, Pause
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling
from rich.console import Console

from holdfast.config import RunConfig
from holdfast.errors import ConfigError, Superseded
from holdfast.journal import Journal
from holdfast.preemption import Notice
from holdfast.store import open_store
from holdfast.supervision import REASONS, End

log = logging.getLogger("holdfast.pool")

NEVER = datetime.max.replace(tzinfo=UTC)
POLL_EVERY_S = 0.5
ASK_AGAIN_S = 0.5
WARN_AFTER = 5  # failures in a row
LOOK_AT_ONESELF_EVERY = 4  # polls
RECENT = 50
# Statuses of a server that is busy, or not there yet.
MAY_PASS = {429, 500, 502, 503, 504}

T = TypeVar("T")


def ask_server(ask: Callable[[SyncPrefectClient], T]) -> T:
    """The server's answer, however long it is away."""
    failures = 0
    while True:
        try:
            # The client's own retries wait for 2, 4, 8, ... seconds, which is too long for a server that is just busy.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), SyncClientContext.get_or_create() as context:
                return ask(context.client)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in MAY_PASS:
                raise
            failures += 1
            if failures == WARN_AFTER:
                log.warning("Prefect's server doesn't answer (%s); it is asked again until it does", error)
            time.sleep(ASK_AGAIN_S)


def tag_of(config: RunConfig) -> str:
    """The tag of all flow runs that are about a run."""
    return f"run:{config.run}"


def claim_train(config: RunConfig) -> None:
    """The flow run that this is called in has the run's tag, and is the only one that trains it, if that is asked for.

    Raises:
        Superseded: another one does.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    own = context.flow_run
    add_tags(own.id, tag_of(config))
    if config.supervision.if_running == "attach":
        return
    for other in find_runs("train", config):
        is_first = (other.start_time or NEVER, str(other.id)) < (own.start_time or NEVER, str(own.id))
        if other.state and other.state.is_running() and other.id != own.id and is_first:
            raise Superseded(
                f"run {config.run!r} is being trained already, by flow run {other.name} ({other.id})",
                hint='--set supervision.if_running="attach" watches it',
            )


def start_attempt(
    config: RunConfig, number: int, again: int = 0, environment: Mapping[str, str] | None = None
) -> FlowRun:
    """The flow run of an attempt: a new one, or the one that was started for it before.

    Args:
        number: the attempt's number.
        again: how many flow runs for the same number have ended before they claimed it.
        environment: what its process has, besides what the pool gives it.

    Raises:
        ConfigError: there is no deployment for the work pool.
    """
    key = f"{config.store}/{config.run}:{number}"
    while True:
        try:
            flow_run = _start(
                f"attempt/{config.where}",
                f"{config.run} attempt {number}",
                f"{key}.{again}" if again else key,
                config,
                environment or {},
                number=number,
            )
        except ObjectNotFound:
            raise ConfigError(
                f'where = "{config.where}": there is no deployment attempt/{config.where}',
                hint="make up makes one here; deployments/prefect.yaml has what is deployed",
            ) from None
        if not flow_run.state or not flow_run.state.is_final():
            return flow_run
        again += 1  # of a run of this name that was deleted, or of an attempt that never claimed its number


def start_train(config: RunConfig, key: str) -> FlowRun:
    """The flow run that trains a run: a new one, or the one that was started with this key before."""
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


def read_state(flow_run: FlowRun) -> State[Any] | None:
    """The state that a flow run has now."""
    return ask_server(lambda client: client.read_flow_run(flow_run.id)).state


def find_live_attempt(config: RunConfig) -> FlowRun | None:
    """The attempt at the run that a worker has, or is to have; None for none."""
    runs = find_runs("attempt", config)
    return next((run for run in runs if run.state and not run.state.is_final()), None)


def find_runs(flow: str, config: RunConfig) -> list[FlowRun]:
    """The newest flow runs of a flow that are about a run, newest first."""
    found = ask_server(
        lambda client: client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])),
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag_of(config)])),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=RECENT,
        )
    )
    return [run for run in found if run.parameters.get("config", {}).get("store") == config.store]


def await_end(flow_run: FlowRun) -> FlowRun:
    """The flow run, when it has ended.

    Raises:
        Pause: the flow run that waits was itself paused by a person.
    """
    for poll in itertools.count():
        found = ask_server(lambda client: client.read_flow_run(flow_run.id))
        if found.state is not None and found.state.is_final():
            return found
        if poll % LOOK_AT_ONESELF_EVERY == 0:
            raise_if_paused()
        time.sleep(POLL_EVERY_S)
    raise AssertionError


def own_state() -> State[Any] | None:
    """What the server says of the flow run that this is called in, if a worker has started it; asked just once."""
    flow_run = own_flow_run()
    if flow_run is None:
        return None
    with (
        contextlib.suppress(httpx.HTTPError),
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        SyncClientContext.get_or_create() as context,
    ):
        return context.client.read_flow_run(flow_run.id).state
    return None  # nobody answers


def own_flow_run() -> FlowRun | None:
    """The flow run that this is called in, if a worker has started it."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    return flow_run if flow_run and flow_run.deployment_id else None


def number_now(config: RunConfig, number: int) -> int:
    """The number of the attempt that this flow run is: a paused one that is resumed is another attempt than before."""
    journal = Journal(open_store(config.store), config.run)
    return journal.attempts() + 1 if was_paused(journal, number) else number


def was_paused(journal: Journal, number: int) -> bool:
    """Whether an attempt ended because a person had paused it."""
    ending = journal.read_ending(number)
    return ending is not None and ending.reason == "paused"


def outlive_worker() -> None:
    """What this process prints may go nowhere: its worker reads it, and may die.

    Rich, with which Prefect prints, would otherwise end the process.
    """
    Console.on_broken_pipe = _print_no_more  # type: ignore[method-assign, assignment]


def _print_no_more(console: Console) -> None:
    console.quiet = True


def raise_if_paused() -> None:
    """Return if nobody has paused the flow run that this is called in.

    Raises:
        Pause: somebody has.
    """
    state = own_state()
    if state is not None and state.is_paused():
        raise Pause(state=state)


def find_pause() -> Callable[[], Notice | None]:
    """What can be asked, from another thread, whether a person has paused the flow run that this is called in."""
    flow_run = own_flow_run()
    if flow_run is None:
        return lambda: None
    context = contextvars.copy_context()

    def ask() -> Notice | None:
        state = context.run(own_state)
        return Notice("a person has paused this attempt", 0.0) if state is not None and state.is_paused() else None

    return ask


def is_being_cancelled() -> bool:
    """Whether a person cancels the flow run that this is called in."""
    state = own_state()
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def cancel(flow_run: FlowRun, within_s: float) -> None:
    """The flow run is told to save and to end, and has ended, or the time is up."""
    ask_server(lambda client: client.set_flow_run_state(flow_run.id, Cancelling()))
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        state = read_state(flow_run)
        if state is None or state.is_final():
            return
        time.sleep(POLL_EVERY_S)


def add_tags(flow_run_id: Any, *tags: str) -> None:
    """The flow run has these tags too."""

    def add(client: SyncPrefectClient) -> None:
        known = client.read_flow_run(flow_run_id).tags
        client.update_flow_run(flow_run_id, tags=sorted({*known, *tags}))

    ask_server(add)


def end_by_state(state: State[Any] | None, step: int) -> End:
    """How an attempt has ended that has not said so itself, by its flow run's state.

    Args:
        step: the newest that is committed.
    """
    if state is None:
        return End("stopped", step=step)
    reason = (state.name or "").lower().replace(" ", "_")
    if state.is_cancelled():
        reason = "cancelled"
    elif reason not in REASONS:
        reason = "stopped"
    return End(reason, state.message or "", step)
