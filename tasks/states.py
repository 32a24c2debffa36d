"""The meaning of the states of an attempt's flow run: why it waits, whether it has ended, and how it has ended."""

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Crashed

from holdfast.journal.endings import REASONS, Ending
from tasks.heartbeat import is_called_vanished

# The name of a Pending state in which a Kubernetes Job exists, but its pod has not started.
PLACED_LATER = "InfrastructurePending"
# The name of a Scheduled state in which a flow run waits for a slot of its deployment's concurrency limit.
QUEUED = "AwaitingConcurrencySlot"
# The beginning of the message if a deployment's concurrency limit has cancelled a flow run. Prefect shows this cause
# only in the message.
TURNED_AWAY = "Deployment concurrency "
# Parts of the message of a worker that could not start a flow run, each with a hint. Without the hint, a person would
# have to search the worker's traceback for the cause, for example that the worker's user has no access to a socket.
HINTS = {
    "Could not connect to Docker": "start the container engine on the worker's machine, or let the worker's user use "
    "the engine's socket; the worker's log names the cause",
}


def kind_of(state: State[Any]) -> str:
    """Return a state's kind, as in the table of `tasks.liveness`."""
    if is_called_vanished(state):
        return "VANISHED"
    return "PREPARING" if state.name == PLACED_LATER else state.type.value


def state_of_lost(state: State[Any], silent_s: float) -> State[Any]:
    """Return the state to set for a lost flow run.

    Args:
        state: the flow run's last state.
        silent_s: the seconds without a heartbeat.
    """
    silence = f"no sign of life for {silent_s:.0f} s"
    if state.is_cancelling():
        return Cancelled(message=f"cancelled; {silence}: its process was gone already")
    if state.name == PLACED_LATER:
        return Crashed(name="Vanished", message=f"the cluster found no machine for this flow run: {silence}")
    if state.is_pending():
        return Crashed(name="Vanished", message=f"a worker took this flow run, but did not start it: {silence}")
    return Crashed(name="Vanished", message=f"{silence}: its process, or its machine, is gone")


def describe_wait(flow_run: FlowRun) -> str:
    """Return a sentence that names the cause of a flow run's wait; empty if it doesn't wait."""
    state, pool = flow_run.state, flow_run.work_pool_name
    if state is not None and state.name == QUEUED:
        return f"{flow_run.name} waits until its deployment has fewer flow runs than its concurrency limit allows"
    if state is None or state.is_scheduled():
        return (
            f"{flow_run.name} waits for a worker of pool {pool}; unless the pool is paused or full, "
            f"python -m deployments.worker {pool} starts one"
        )
    if state.name == PLACED_LATER:
        return f"{flow_run.name} waits for its cluster to find a machine and to pull the image; its own log says more"
    if state.is_pending():
        return f"{flow_run.name} is being started by a worker"
    if state.is_paused():
        return f"{flow_run.name} is paused; it waits until a person resumes it"
    return ""


def describe_turned_away(state: State[Any] | None) -> str:
    """Return the reason why the server itself has cancelled a flow run; empty if the server hasn't.

    The server cancels a flow run above its deployment's concurrency limit if the collision strategy is CANCEL_NEW.
    """
    message = (state.message if state is not None and state.is_cancelled() else None) or ""
    return message.rstrip(".") if message.startswith(TURNED_AWAY) else ""


def is_final(flow_run: FlowRun) -> bool:
    """Return whether a flow run has ended."""
    return flow_run.state is not None and flow_run.state.is_final()


def ending_of_state(state: State[Any] | None, step: int) -> Ending:
    """Return the ending of an attempt without an ending record, derived from its flow run's state.

    Args:
        step: the newest committed step.
    """
    if state is None:
        return Ending("stopped", step=step)
    reason = (state.name or "").lower().replace(" ", "_")
    if state.is_cancelled():
        reason = "cancelled"
    elif reason not in REASONS:
        reason = "stopped"
    message = state.message or ""
    hints = [hint for part, hint in HINTS.items() if part in message]
    return Ending(reason, "; ".join([message.removesuffix(".") if hints else message, *hints]), step)
