"""Flow runs whose process is gone without a report, as after SIGKILL: find them, and set them to Crashed.

Prefect's server shows such a flow run as Running forever. A worker's flow runs send heartbeats (`tasks.heartbeat`); a
flow run of a command on this machine has a label with its process instead, which the next command on the same machine
looks for.
"""

import contextlib
import logging
import os
from pathlib import Path

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from holdfast.machine.host import name_host
from tasks.asking import ask_server
from tasks.pool import end_tasks
from tasks.processes import began_at, is_recorded_process

# The label that records a flow run's process: its host, its id and its start, separated by a bar.
PROCESS_LABEL = "holdfast.process"
UNENDED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
NAMESPACE = "/proc/self/ns/pid"
MOST = 200  # the server's limit for one answer

log = logging.getLogger("holdfast.train")


def name_process() -> None:
    """Label the current flow run with this process. Ignore a refusal, because training needs no label."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    flow_run_id, label = context.flow_run.id, f"{_name_place()}|{os.getpid()}|{began_at(os.getpid())}"
    with contextlib.suppress(ObjectNotFound, httpx.HTTPStatusError):
        ask_server(lambda client: client.update_flow_run_labels(flow_run_id, {PROCESS_LABEL: label}))


def _name_place() -> str:
    """Return this host with its namespace of process ids: a container may have the name of its host."""
    with contextlib.suppress(OSError):
        return f"{name_host()} {Path(NAMESPACE).readlink()}"
    return name_host()


def end_lost(tag: str = "") -> list[FlowRun]:
    """Set the flow runs to Crashed whose process was on this machine and is gone. Return them.

    A flow run that was being cancelled becomes Cancelled.

    Args:
        tag: end only flow runs with this tag that a command has started, because a supervisor watches the flow runs of
            workers; by default end any flow run of the server.
    """
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNENDED))
    tags = FlowRunFilterTags(all_=[tag]) if tag else None

    def read(client: SyncPrefectClient) -> list[FlowRun]:
        chosen = FlowRunFilter(state=states, tags=tags)
        return client.read_flow_runs(flow_run_filter=chosen, sort=FlowRunSort.START_TIME_DESC, limit=MOST)

    lost = [each for each in ask_server(read) if is_lost(each) and not (tag and each.deployment_id)]
    for each in lost:
        _end(each)
    return lost


def is_lost(flow_run: FlowRun) -> bool:
    """Return whether a flow run's process was on this machine and is gone. Without its label this isn't known."""
    place, _, process = str(flow_run.labels.get(PROCESS_LABEL, "")).partition("|")
    pid, _, began = process.partition("|")
    return place == _name_place() and pid.isdecimal() and bool(began) and not is_recorded_process(int(pid), began)


def _end(flow_run: FlowRun) -> None:
    pid = str(flow_run.labels[PROCESS_LABEL]).split("|")[1]
    reason = f"process {pid} on {name_host()} is gone and reported no end: it was killed, or the machine stopped"
    is_cancelling = flow_run.state is not None and flow_run.state.is_cancelling()
    name = "Vanished" if flow_run.deployment_id else "Crashed"  # the name that the watchers of heartbeats use, too
    state: State[object] = (
        Cancelled(message=f"cancelled; {reason}") if is_cancelling else Crashed(name=name, message=reason)
    )
    with contextlib.suppress(ObjectNotFound):
        ask_server(lambda client: client.set_flow_run_state(flow_run.id, state, force=True))
        end_tasks(flow_run)
        log.info("flow run %s is set to %s: %s", flow_run.name, state.name, reason)
