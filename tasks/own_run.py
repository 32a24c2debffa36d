"""The flow run that this process is: what the server says of it, and what a person asks of it."""

import contextvars
import time
from collections.abc import Callable
from typing import Any

import httpx
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext, SyncClientContext
from prefect.exceptions import ObjectNotFound, Pause
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from rich.console import Console

from holdfast.liveness import Request, is_cancel
from holdfast.preemption import Notice

ASK_WITHIN_S = 5.0
ASK_AGAIN_S = 0.5


def own_flow_run() -> FlowRun | None:
    """Return the flow run that this is called in, if a worker started it."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    return flow_run if flow_run and flow_run.deployment_id else None


def read_own_state() -> State[Any] | None:
    """Return the state of the flow run that this is called in; None if no worker started it, or it was deleted.

    Raises:
        httpx.HTTPError: the server doesn't answer.
    """
    flow_run = own_flow_run()
    if flow_run is None:
        return None
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), SyncClientContext.get_or_create() as context:
        try:
            return context.client.read_flow_run(flow_run.id).state
        except ObjectNotFound:
            return None  # somebody has deleted it


def is_being_cancelled(within_s: float = ASK_WITHIN_S) -> bool | None:
    """Return whether a person cancels the flow run that this is called in; None if the server doesn't answer in time.

    Args:
        within_s: how long to ask again while the server doesn't answer.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return is_cancel(read_own_state())
        except httpx.HTTPError:
            if time.monotonic() + ASK_AGAIN_S > deadline:
                return None
            time.sleep(ASK_AGAIN_S)


def raise_if_paused() -> None:
    """Return if nobody has paused the flow run that this is called in, or if the server doesn't answer.

    Raises:
        Pause: a person has paused it.
    """
    try:
        state = read_own_state()
    except httpx.HTTPError:
        return
    if state is not None and state.is_paused():
        raise Pause(state=state)


def make_request(save_within_s: float) -> tuple[Request, list[Callable[[], Notice | None]]]:
    """Return what a person asks of the flow run that this is called in, and the sources of notices that look for it.

    Args:
        save_within_s: how long the last save may take once a person asks for an end.
    """
    context = contextvars.copy_context()

    def read() -> State[Any] | None:
        try:
            return context.run(read_own_state)
        except httpx.HTTPError:
            return None

    request = Request(read, save_within_s)
    return request, [lambda: request.judge(request.read(), time.monotonic())] if own_flow_run() else []


def outlive_worker() -> None:
    """Let this process live on when its worker, which reads what it prints, has died.

    Rich, with which Prefect prints, would otherwise end the process.
    """
    Console.on_broken_pipe = _print_no_more  # type: ignore[method-assign, assignment]


def _print_no_more(console: Console) -> None:
    console.quiet = True
