"""Attempts as flow runs on a work pool: started once, watched, cancelled.

The server may be away for a while: what can't be asked now is asked again. What a run's attempts have done is read
from its journal alone; the server only says that one has ended. Every flow run that is waited for is watched for signs
of life (`holdfast.liveness`), so that nothing waits for one whose process is gone.
"""

import contextlib
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
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Cancelling, Crashed

from holdfast.config import RunConfig
from holdfast.endings import REASONS, Ending
from holdfast.errors import ConfigError, Superseded
from holdfast.journal import Journal
from holdfast.liveness import Verdict, Watch
from holdfast.store import open_store
from tasks.heartbeat import BEAT_LABEL
from tasks.own_run import raise_if_paused

log = logging.getLogger("holdfast.pool")

NEVER = datetime.max.replace(tzinfo=UTC)
POLL_EVERY_S = 0.5
ASK_AGAIN_S = 0.5
WARN_AFTER = 5  # failures in a row
LOOK_AT_ONESELF_EVERY = 4  # polls
SAY_AFTER_S = 10.0  # of waiting for a worker
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
        is_running = other.state is not None and other.state.is_running()
        if is_running and other.id != own.id and is_first and await_sign(other):
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


def look(flow_run: FlowRun, watch: Watch) -> FlowRun:
    """Return the flow run as it is now. If it is lost, its state says so first.

    Args:
        watch: what was seen of it before; the same one each time.
    """
    try:
        found = ask_server(lambda client: client.read_flow_run(flow_run.id))
    except ObjectNotFound:
        # Deleted, or unknown to a server that was restored from a backup.
        gone: State[Any] = Crashed(name="Vanished", message="Prefect's server does not know it any more")
        return flow_run.model_copy(update={"state": gone})
    state = found.state
    if state is None:
        return found
    if watch.judge(state.type.value, state.id, found.labels.get(BEAT_LABEL), time.monotonic()) is not Verdict.LOST:
        return found
    lost = state_of_lost(state, watch.silent_s)
    log.warning("%s is %s, but lost: %s", found.name, state.name, lost.message)
    ask_server(lambda client: client.set_flow_run_state(found.id, lost, force=True))
    return ask_server(lambda client: client.read_flow_run(found.id))


def state_of_lost(state: State[Any], silent_s: float) -> State[Any]:
    """Return the state that a lost flow run is set to.

    Args:
        state: the state that it was left in.
        silent_s: how long it gave no sign of life.
    """
    silence = f"no sign of life for {silent_s:.0f} s"
    if state.is_cancelling():
        return Cancelled(message=f"cancelled; {silence}: its process was gone already")
    if state.is_pending():
        return Crashed(name="Vanished", message=f"its worker took it and did not start it: {silence}")
    return Crashed(name="Vanished", message=f"{silence}: its process, or its machine, is gone")


def describe_wait(flow_run: FlowRun) -> str:
    """Return what a flow run waits for, as a person reads it; empty if it doesn't wait."""
    state, pool = flow_run.state, flow_run.work_pool_name
    if state is None or state.is_scheduled():
        return f"{flow_run.name} waits for a worker of pool {pool}; prefect worker start --pool {pool} starts one"
    if state.is_pending():
        return f"{flow_run.name} waits for its worker, which took it, to start it"
    if state.is_paused():
        return f"{flow_run.name} is paused; it waits until a person resumes it"
    return ""


def is_final(flow_run: FlowRun) -> bool:
    """Return whether a flow run has ended."""
    return flow_run.state is not None and flow_run.state.is_final()


def find_live_attempt(config: RunConfig) -> FlowRun | None:
    """Return the newest attempt at the run that has not ended, as far as the server knows; None if all have.

    Its process may be gone: `await_end` finds that out.
    """
    runs = find_runs("attempt", config)
    return next((run for run in runs if not is_final(run)), None)


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
    """Return the flow run when it has ended, or is lost. What it waits for is logged once.

    Raises:
        Pause: the flow run that waits was itself paused by a person.
    """
    watch, said, began = Watch(), "", time.monotonic()
    for poll in itertools.count():
        found = look(flow_run, watch)
        if is_final(found):
            return found
        waits_for = describe_wait(found)
        if waits_for not in ("", said) and time.monotonic() - began > SAY_AFTER_S:
            log.info("%s", waits_for)
            said = waits_for
        if poll % LOOK_AT_ONESELF_EVERY == 0:
            raise_if_paused()
        time.sleep(POLL_EVERY_S)
    raise AssertionError


def await_sign(flow_run: FlowRun) -> bool:
    """Return whether a flow run that is Running lives: True after its next sign of life, False when it is lost."""
    if flow_run.deployment_id is None:
        return True  # a person's command, which gives no signs of life
    watch = Watch()
    while not is_final(look(flow_run, watch)):
        if watch.has_beaten:
            return True
        time.sleep(POLL_EVERY_S)
    return False


def number_now(config: RunConfig, number: int) -> int:
    """The number of the attempt that this flow run is: a paused one that is resumed is another attempt than before."""
    journal = Journal(open_store(config.store), config.run)
    return journal.attempts() + 1 if was_paused(journal, number) else number


def was_paused(journal: Journal, number: int) -> bool:
    """Whether an attempt ended because a person had paused it."""
    ending = journal.read_ending(number)
    return ending is not None and ending.reason == "paused"


def cancel(flow_run: FlowRun, within_s: float) -> None:
    """Tell a flow run to save and to end, and wait until it has ended, is lost, or the time is up."""
    with contextlib.suppress(ObjectNotFound):
        ask_server(lambda client: client.set_flow_run_state(flow_run.id, Cancelling()))
    watch, deadline = Watch(), time.monotonic() + within_s
    while not is_final(look(flow_run, watch)) and time.monotonic() < deadline:
        time.sleep(POLL_EVERY_S)


def add_tags(flow_run_id: Any, *tags: str) -> None:
    """Add tags to a flow run, if the server still knows it."""

    def add(client: SyncPrefectClient) -> None:
        known = client.read_flow_run(flow_run_id).tags
        client.update_flow_run(flow_run_id, tags=sorted({*known, *tags}))

    with contextlib.suppress(ObjectNotFound):
        ask_server(add)


def end_by_state(state: State[Any] | None, step: int) -> Ending:
    """How an attempt has ended that has not said so itself, by its flow run's state.

    Args:
        step: the newest that is committed.
    """
    if state is None:
        return Ending("stopped", step=step)
    reason = (state.name or "").lower().replace(" ", "_")
    if state.is_cancelled():
        reason = "cancelled"
    elif reason not in REASONS:
        reason = "stopped"
    return Ending(reason, state.message or "", step)
