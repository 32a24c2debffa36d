"""Tests of endings: from the attempt's record, from the server's state, and without an answer of the server."""

import signal
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running

from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.store import open_store
from tasks import own_run
from tasks.states import ending_of_state
from tasks.supervisor import settle_ending
from tests.support.makers import claim


def answer(monkeypatch: pytest.MonkeyPatch, state: State[Any] | None) -> None:
    """Let the server report this state for the current flow run. None: the server doesn't answer."""

    def read_own_state(at_most_s: float = 0.0) -> State[Any]:
        if state is None:
            raise httpx.ConnectError("nobody listens")
        return state

    monkeypatch.setattr(own_run, "read_own_state", read_own_state)
    monkeypatch.setattr(own_run, "ASK_AGAIN_S", 0.01)


@pytest.mark.parametrize(
    ("state", "is_cancelled"),
    [(Cancelling(), True), (Cancelled(), True), (Running(), False), (None, None)],
    ids=["cancelling", "cancelled", "running", "nobody answers"],
)
def test_is_being_cancelled_has_three_answers(
    monkeypatch: pytest.MonkeyPatch, state: State[Any] | None, is_cancelled: bool | None
) -> None:
    answer(monkeypatch, state)
    assert own_run.is_being_cancelled(within_s=0.1) is is_cancelled


@pytest.mark.parametrize(
    ("is_cancelled", "reason", "says"),
    [(True, "cancelled", "by a person"), (False, "preempted", "signal"), (None, "preempted", "did not say")],
)
def test_a_signal_means_cancelled_only_if_the_server_says_so(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool | None, reason: str, says: str
) -> None:
    monkeypatch.setattr(own_run, "is_being_cancelled", lambda: is_cancelled)
    end = own_run.Asked(60.0).find_ending(TerminationSignal(signal.SIGTERM))
    assert end.reason == reason
    assert says in end.message


@pytest.mark.parametrize(
    ("said", "state", "reason"),
    [
        ("preempted", Cancelled(), "cancelled"),
        ("preempted", Completed(name="Preempted"), "preempted"),
        ("completed", Cancelled(), "completed"),
        ("crashed", Crashed(name="Vanished"), "crashed"),
        ("paused", Crashed(name="Vanished"), "vanished"),  # resumed, and lost before it claimed another attempt
        ("", Crashed(name="Vanished"), "vanished"),
        ("", Cancelled(), "cancelled"),
    ],
)
def test_the_server_overrules_a_recorded_preemption_or_pause(said: str, state: State[Any], reason: str) -> None:
    """The attempt could not reach the server and recorded that it was preempted, or it was paused and resumed."""
    journal = Journal(open_store(f"memory://endings-{said}-{state.name}"), "run")
    claim(journal, 1)
    if said:
        journal.end_attempt(1, Ending(said, "", 4))
    assert settle_ending(journal, 1, state).reason == reason


def test_an_engine_that_a_worker_cannot_reach_comes_with_a_hint() -> None:
    said = "Failed to submit flow run to infrastructure: RuntimeError: Could not connect to Docker."
    ending = ending_of_state(Crashed(message=said), 7)
    assert (ending.reason, ending.step) == ("crashed", 7)
    assert ending.message.startswith(said.removesuffix(".") + "; start the container engine on the worker's machine")
    assert ending_of_state(Crashed(message="Killed."), 7).message == "Killed."
