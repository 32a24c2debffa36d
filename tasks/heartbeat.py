"""Heartbeats: every few seconds a flow run proves that it is alive. It emits an event, and renews its own label.

`tasks.pool` watches the label, from which `tasks.liveness` decides whether the flow run is alive. An automation sets a
flow run without events to Crashed, even if nothing watches it (`deployments.automations`). Prefect's own heartbeats
come every 30 seconds at most.

An automation can be wrong, because no event arrives while the server is away. If a live flow run finds that its state
says "vanished", it sets the state back to Running.
"""

import contextlib
import contextvars
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Running
from prefect.types import KeyValueLabels

from tasks.asking import TRANSIENT
from tasks.liveness import EVERY_S
from tasks.own_run import RECENT, SHARED_FOR_S

EVENT = "holdfast.heartbeat"
LAST_EVENT = "holdfast.heartbeat.last"
# A live flow run that is being cancelled emits this event besides its heartbeats. The automation for cancelled flow
# runs waits for this event and not for heartbeats, because each heartbeat would then cost the server a transaction.
CANCELLING_EVENT = "holdfast.heartbeat.cancelling"
BEAT_LABEL = "holdfast.beat"
# The label is renewed only at every second heartbeat, because a new label rewrites the flow run's row in the database.
# A watcher waits for ten heartbeats, so this suffices.
LABEL_BEATS = 2
# The timeout of one request, in seconds.
BEAT_WITHIN_S = 2.0
# Seconds to wait before each further try to write a label that the server has refused. A server with several
# connections to an SQLite file answers 503 if another request is writing at the same time.
TRY_AGAIN_AFTER_S = (0.1, 0.3, 0.6)

log = logging.getLogger("holdfast.heartbeat")


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Send heartbeats for the current flow run during the block, if a worker started the flow run.

    Separate threads send the heartbeats, so that they are also sent while the main thread is busy. One thread sends
    events and another sends labels, because events need no answer of the server. If events waited for the label, they
    would come 11.6 s apart with a server that takes 1.9 s to refuse each try of a label. The automation's window is 10
    s.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        yield
        return
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{context.flow_run.id}",
        "prefect.resource.name": context.flow_run.name,
    }
    done = threading.Event()
    # Run the threads in the caller's context, because it has Prefect's settings.
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=each, name="heartbeat", daemon=True)
        for each in ((_emit_events, resource, done), (_renew_labels, context.flow_run, resource, done))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(2 * BEAT_WITHIN_S)
        RECENT.forget(context.flow_run.id)
        # This event follows all heartbeats; the server's own event of the flow run's end may come before the last one.
        emit_event(LAST_EVENT, resource)


def _emit_events(resource: dict[str, str], done: threading.Event) -> None:
    while not done.is_set():
        emit_event(EVENT, resource)
        done.wait(EVERY_S)


def _renew_labels(flow_run: FlowRun, resource: dict[str, str], done: threading.Event) -> None:
    timeout: dict[str, Any] = {"timeout": BEAT_WITHIN_S}
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings=timeout, sync_client=True) as client,
    ):
        has_told = False
        for beat in itertools.count():
            if done.is_set():
                return
            try:
                if beat % LABEL_BEATS == 0:
                    renew_label(client, flow_run)
                deny_that_it_vanished(client, flow_run)
            except Exception as error:  # an error of the server or its client must not end the heartbeat
                if not has_told:  # a busy server may refuse many heartbeats in a row; log only the first
                    log.info("a heartbeat did not reach Prefect's server (%r); the run continues", error)
                has_told = True
            # Emit this event even if the label's request failed, because the server may still accept events.
            if is_known_as_cancelling(flow_run):
                emit_event(CANCELLING_EVENT, resource)
            done.wait(EVERY_S)


def renew_label(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Write a new value into the flow run's label. If the server is too busy, try again soon.

    Raises:
        PrefectHTTPStatusError: the server has refused each try.
    """
    # A watcher only compares this value with the last one, without any clock. So any new value proves that the flow run
    # is alive.
    labels: KeyValueLabels = {BEAT_LABEL: secrets.token_hex(8)}
    for wait_s in TRY_AGAIN_AFTER_S:
        try:
            client.update_flow_run_labels(flow_run.id, labels)
            return
        except PrefectHTTPStatusError as error:
            if error.response.status_code not in TRANSIENT:
                raise
        time.sleep(wait_s)
    client.update_flow_run_labels(flow_run.id, labels)


def deny_that_it_vanished(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Set the current flow run back to Running if its state on the server says that it has vanished.

    If another thread of this process has just read any other state, no request is sent.
    """
    recent = RECENT.find(flow_run.id, SHARED_FOR_S)
    if recent is not None and (recent[0] is None or not is_called_vanished(recent[0])):
        return
    asked_at = time.monotonic()
    state = client.read_flow_run(flow_run.id).state
    RECENT.remember(flow_run.id, state, asked_at)
    if state is not None and is_called_vanished(state):
        log.warning(
            "Prefect's server has marked this flow run as crashed (%s), but the flow run is alive and continues",
            state.message,
        )
        client.set_flow_run_state(flow_run.id, Running(message="was recorded as vanished, but is alive"), force=True)


def is_known_as_cancelling(flow_run: FlowRun) -> bool:
    """Return whether the state that this process last read says that a person is cancelling the flow run."""
    found = RECENT.find(flow_run.id, math.inf)
    return found is not None and found[0] is not None and found[0].is_cancelling()


def is_called_vanished(state: State[Any]) -> bool:
    """Return whether a watcher has set this state because heartbeats were missing."""
    return state.is_crashed() and state.name == "Vanished"
