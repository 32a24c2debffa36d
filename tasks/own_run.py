"""The flow run that this process is: what the server says of it, and what a person asks of it."""

import contextvars
import time
from typing import Any

import httpx
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext, SyncClientContext
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from rich.console import Console

from holdfast.attempt import Cause, find_ending
from holdfast.endings import Ending
from holdfast.liveness import Request, is_cancel
from holdfast.preemption import Notice

ASK_WITHIN_S = 5.0
ASK_AGAIN_S = 0.5
BY_A_PERSON = "by a person"


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


class Asked:
    """What a person asks of the flow run that this is made in, and what its end is called for that.

    Attributes:
        is_on_pool: whether a worker started it.
        sources: the sources of notices that ask for it.
        ending: how the attempt ended; None until `find_ending` has found it.
    """

    def __init__(self, save_within_s: float) -> None:
        """
        Args:
            save_within_s: how long the last save may take once a person asks for an end.
        """
        context = contextvars.copy_context()

        def read() -> State[Any] | None:
            try:
                return context.run(read_own_state)
            except httpx.HTTPError:
                return None

        self.is_on_pool = own_flow_run() is not None
        self.ending: Ending | None = None
        self._paused: State[Any] | None = None
        self._request = request = Request(read, save_within_s)
        self.sources = [lambda: request.judge(request.read(), time.monotonic())] if self.is_on_pool else []

    def find_ending(self, cause: Cause) -> Ending:
        """Return how the attempt ended: a notice and a signal may come from a person who pauses or cancels it."""
        self.ending = find_ending(cause)
        if isinstance(cause, Pause):
            self.ending = Ending("paused", BY_A_PERSON)
        elif isinstance(cause, TerminationSignal | KeyboardInterrupt):
            self.ending = self._find_signals_ending()
        elif isinstance(cause, Notice):
            state = self._request.state or self._request.read()
            if state is not None and state.is_paused():
                self.ending, self._paused = Ending("paused", BY_A_PERSON), state
            elif is_cancel(state):
                self.ending = Ending("cancelled", BY_A_PERSON)
        return self.ending

    def _find_signals_ending(self) -> Ending:
        """Return how an attempt ended that a signal has stopped.

        If the server can't say whether a person cancels it, it counts as preempted here, and `flows.train` starts no
        other one where the server says so later.
        """
        is_cancelled = is_being_cancelled()
        if is_cancelled:
            return Ending("cancelled", BY_A_PERSON)
        unknown = "; Prefect's server did not say whether a person cancels it" if is_cancelled is None else ""
        return Ending("preempted", f"told to end by a signal{unknown}")

    def raise_if_paused(self) -> None:
        """Return unless a notice has ended the attempt because a person has paused it.

        Raises:
            Pause: a person has; Prefect then shows the flow run as paused.
        """
        if self._paused is not None:
            raise Pause(state=self._paused)


def outlive_worker() -> None:
    """Let this process live on when its worker, which reads what it prints, has died.

    Rich, with which Prefect prints, would otherwise end the process.
    """
    Console.on_broken_pipe = _print_no_more  # type: ignore[method-assign, assignment]


def _print_no_more(console: Console) -> None:
    console.quiet = True
