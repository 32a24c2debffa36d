"""This process's own flow run: its state on the server, and a person's requests to pause or cancel it."""

import contextvars
import math
import time
from dataclasses import replace
from typing import Any
from uuid import UUID

import httpx
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext, SyncClientContext
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from rich.console import Console

from holdfast.attempt import Cause, find_ending
from holdfast.journal.endings import TOLD_BY_A_SIGNAL, Ending
from holdfast.machine.preemption import Notice
from tasks.liveness import EVERY_S, Request, is_cancel

ASK_WITHIN_S = 5.0
ASK_AGAIN_S = 0.5
# When the heartbeat, or a poll for a person's request, has read the flow run's state, all threads of this process use
# that state for this number of seconds.
SHARED_FOR_S = 0.9 * EVERY_S
BY_A_PERSON = "by a person"


def own_flow_run() -> FlowRun | None:
    """Return the current flow run if a worker started it, else None."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    return flow_run if flow_run and flow_run.deployment_id else None


class RecentStates:
    """For each flow run of this process, its state when a thread last read it, and the time. All threads share them."""

    def __init__(self) -> None:
        self._read: dict[UUID, tuple[State[Any] | None, float]] = {}

    def remember(self, flow_run_id: UUID, state: State[Any] | None, asked_at: float) -> None:
        """Remember a state that the server has returned, and the time just before the request (monotonic clock)."""
        if asked_at >= self._read.get(flow_run_id, (None, -math.inf))[1]:  # another thread's answer may be newer
            self._read[flow_run_id] = state, asked_at

    def find(self, flow_run_id: UUID, at_most_s: float) -> tuple[State[Any] | None] | None:
        """Return a flow run's state, in a tuple, if it was read less than ``at_most_s`` seconds ago, else None."""
        state, asked_at = self._read.get(flow_run_id, (None, -math.inf))
        return (state,) if time.monotonic() - asked_at < at_most_s else None

    def forget(self, flow_run_id: UUID) -> None:
        """Forget an ended flow run."""
        self._read.pop(flow_run_id, None)


RECENT = RecentStates()


def read_own_state(at_most_s: float = 0.0) -> State[Any] | None:
    """Return the current flow run's state on the server; None if no worker started it, or if it was deleted.

    Args:
        at_most_s: send no request if a thread of this process has read the state less than this many seconds ago.

    Raises:
        httpx.HTTPError: the server doesn't answer.
    """
    flow_run = own_flow_run()
    if flow_run is None:
        return None
    if (found := RECENT.find(flow_run.id, at_most_s)) is not None:
        return found[0]
    asked_at = time.monotonic()
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), SyncClientContext.get_or_create() as context:
        try:
            state = context.client.read_flow_run(flow_run.id).state
        except ObjectNotFound:
            return None  # a person has deleted the flow run
    RECENT.remember(flow_run.id, state, asked_at)
    return state


def is_being_cancelled(within_s: float = ASK_WITHIN_S) -> bool | None:
    """Return whether a person is cancelling the current flow run; None if the server doesn't answer in time.

    Args:
        within_s: the limit for retries, in seconds.
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
    """Raise Pause if a person has paused the current flow run. Do nothing if the server doesn't answer.

    If the heartbeat or another poll has read the flow run's state within the last ``SHARED_FOR_S`` seconds, use that
    state instead of asking the server again.

    Raises:
        Pause: a person has paused the flow run.
    """
    try:
        state = read_own_state(SHARED_FOR_S)
    except httpx.HTTPError:
        return
    if state is not None and state.is_paused():
        raise Pause(state=state)


class Asked:
    """A person's requests to pause or cancel the current flow run, and the ending that they cause.

    Attributes:
        is_on_pool: whether a worker started the flow run.
        sources: the sources of notices for `live`, which poll for a person's request; none if no worker started the
            flow run.
        ending: how the attempt ended; None until `find_ending` has found it.
    """

    def __init__(self, save_within_s: float) -> None:
        """
        Args:
            save_within_s: the limit for the last save after a request, in seconds.
        """
        context = contextvars.copy_context()

        def read(at_most_s: float = 0.0) -> State[Any] | None:
            try:
                return context.run(read_own_state, at_most_s)
            except httpx.HTTPError:
                return None

        self.is_on_pool = own_flow_run() is not None
        self.ending: Ending | None = None
        self._paused: State[Any] | None = None
        self._request = request = Request(read, save_within_s)
        self.sources = [lambda: request.judge(read(SHARED_FOR_S), time.monotonic())] if self.is_on_pool else []

    def find_ending(self, cause: Cause) -> Ending:
        """Return the attempt's ending. Ask the server whether a person's pause or cancel caused the end."""
        self.ending = find_ending(cause)
        if isinstance(cause, Pause):
            self.ending = Ending("paused", BY_A_PERSON)
        elif isinstance(cause, TerminationSignal | KeyboardInterrupt):
            self.ending = _find_ending_after_signal()
        elif isinstance(cause, Notice):
            state = self._request.state or self._request.read()
            if state is not None and state.is_paused():
                self.ending, self._paused = Ending("paused", BY_A_PERSON), state
            elif is_cancel(state):
                self.ending = Ending("cancelled", BY_A_PERSON)
        return self.ending

    def raise_if_paused(self) -> None:
        """Raise Pause if the attempt ended because a person paused it.

        Raises:
            Pause: a person paused the flow run. Prefect then shows it as paused.
        """
        if self._paused is not None:
            raise Pause(state=self._paused)


def _find_ending_after_signal() -> Ending:
    """Return the ending of an attempt that a signal has stopped: cancelled or preempted.

    If the server doesn't answer, the attempt counts as preempted. If the server later reports a cancel, `train` starts
    no further attempt.
    """
    is_cancelled = is_being_cancelled()
    if is_cancelled:
        return Ending("cancelled", BY_A_PERSON)
    unknown = "; Prefect's server did not say whether a person cancels it" if is_cancelled is None else ""
    return replace(TOLD_BY_A_SIGNAL, message=f"{TOLD_BY_A_SIGNAL.message}{unknown}")


def outlive_worker() -> None:
    """Keep this process alive after its worker has died.

    The worker reads this process's output through a pipe. When the pipe breaks, the library Rich, which prints for
    Prefect, would end the process.
    """
    Console.on_broken_pipe = _print_no_more  # type: ignore[method-assign, assignment]


def _print_no_more(console: Console) -> None:
    console.quiet = True
