"""Signs of life of a flow run, every few seconds: a label of the flow run, and an event.

`tasks.pool` watches the label, and judges by it (`holdfast.liveness`). An automation turns the event's absence into
Crashed where nothing watches (`deployments.automations`). Prefect's own heartbeats come every 30 seconds at the most.
"""

import contextlib
import contextvars
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from holdfast.liveness import EVERY_S

EVENT = "holdfast.heartbeat"
LAST_EVENT = "holdfast.heartbeat.last"
BEAT_LABEL = "holdfast.beat"
# A beat that takes longer is given up, so that the events still come within the automation's window.
BEAT_WITHIN_S = 2.0

log = logging.getLogger("holdfast.heartbeat")


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Give signs of life for the flow run that this is called in, if a worker started it, while the block lasts.

    They come from a thread of their own, and so from a process that lives, however busy its main thread is.
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
    # In the caller's context, which has Prefect's settings.
    beat = contextvars.copy_context().run
    thread = threading.Thread(
        target=beat, args=(_beat, context.flow_run, resource, done), name="heartbeat", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(2 * BEAT_WITHIN_S)
        emit_event(LAST_EVENT, resource)  # comes after all others, which the server's own event of the end may not


def _beat(flow_run: FlowRun, resource: dict[str, str], done: threading.Event) -> None:
    timeout: dict[str, Any] = {"timeout": BEAT_WITHIN_S}
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings=timeout, sync_client=True) as client,
    ):
        is_failing = False
        while not done.is_set():
            emit_event(EVENT, resource)
            try:
                # Any new value is a sign: it is compared with the last one, and with no clock.
                client.update_flow_run_labels(flow_run.id, {BEAT_LABEL: secrets.token_hex(8)})
                is_failing = False
            except Exception as error:  # whatever the server or its client does, the process is alive
                if not is_failing:
                    log.info("a sign of life did not reach Prefect's server (%r); the next one may", error)
                is_failing = True
            done.wait(EVERY_S)
