"""A sign of life, every few seconds: an event whose absence an automation turns into Crashed.

Prefect's own heartbeats come every 30 seconds at the most. See `deployments.automations`.
"""

import contextlib
import threading
from collections.abc import Iterator

from prefect.context import FlowRunContext
from prefect.events import emit_event

EVENT = "holdfast.heartbeat"
LAST_EVENT = "holdfast.heartbeat.last"
EVERY_S = 3.0


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """While the block lasts, the flow run that it is in gives signs of life, if a worker has started it.

    They come from a thread of their own, and so from a process that lives, whatever it is busy with.
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

    def beat() -> None:
        while not done.is_set():
            emit_event(EVENT, resource)
            done.wait(EVERY_S)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        emit_event(LAST_EVENT, resource)  # comes after all others, which the server's own event of the end may not
