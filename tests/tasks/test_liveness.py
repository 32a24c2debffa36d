"""Tests of the verdict on a flow run, from given states, signs of life and times; they start no process."""

import math
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import (
    AwaitingConcurrencySlot,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    InfrastructurePending,
    Paused,
    Pending,
    Running,
    Scheduled,
)

from tasks.liveness import (
    CANCELLED_AFTER_S,
    DOUBTED_FOR_S,
    EVERY_S,
    LONGEST_GAP_S,
    LOST_AFTER_S,
    NOT_BEGUN_AFTER_S,
    NOT_PLACED_AFTER_S,
    SIGNALLED_WITHIN_S,
    ProcessVerdict,
    ProcessWatch,
    Request,
    read_seconds,
)
from tasks.states import describe_turned_away, describe_wait, kind_of, state_of_lost

POLL_S = 0.5
LONG_S = 4000.0
LONG_AGO = datetime.now(UTC) - timedelta(days=400)


def flow_run(state: State[Any]) -> FlowRun:
    return FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="toy attempt 1", state=state, work_pool_name="gpu")


def judge(watch: ProcessWatch, state: State[Any], mark: str, now: float) -> ProcessVerdict:
    return watch.judge(kind_of(state), state.id, mark, now)


def lost_after(states: Iterable[tuple[float, State[Any], str]], until_s: float) -> float:
    """Poll twice a second; return the second at which the process is first judged lost, or infinity.

    Args:
        states: second, state and sign of life, for each change of the process.
    """
    watch, changes = ProcessWatch(), list(states)
    for poll in range(int(until_s / POLL_S) + 1):
        now = poll * POLL_S
        _, state, beat = max((change for change in changes if change[0] <= now), key=lambda change: change[0])
        if judge(watch, state, beat, 1000.0 + now) is ProcessVerdict.LOST:
            return now
    return math.inf


@pytest.mark.parametrize(
    ("state", "window_s"),
    [
        (Running(), LOST_AFTER_S),
        (Cancelling(), CANCELLED_AFTER_S),
        (Pending(), NOT_BEGUN_AFTER_S),
        (InfrastructurePending(), NOT_PLACED_AFTER_S),
        (Scheduled(), math.inf),
        (Scheduled(name="Late"), math.inf),
        (Paused(), math.inf),
        (State(type=StateType.PAUSED, name="Suspended"), math.inf),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_silent_process_is_lost_after_its_states_window(state: State[Any], window_s: float) -> None:
    assert lost_after([(0, state, "a")], LONG_S) == (window_s + POLL_S if window_s < math.inf else math.inf)


@pytest.mark.parametrize("state", [Completed(), Failed(), Crashed(), Cancelled(), Completed(name="Preempted")])
def test_an_ended_process_is_never_lost(state: State[Any]) -> None:
    watch = ProcessWatch()
    assert {judge(watch, state, "", now) for now in range(0, 1000, 5)} == {ProcessVerdict.ENDED}


@pytest.mark.parametrize("state", [Running(), Cancelling()])
@pytest.mark.parametrize("every_s", [EVERY_S, 4 * EVERY_S])
def test_a_process_is_lost_one_window_after_its_last_sign(state: State[Any], every_s: float) -> None:
    signs = [(at * every_s, state, str(at)) for at in range(20)]
    window_s = LOST_AFTER_S if state.is_running() else CANCELLED_AFTER_S
    assert lost_after(signs, LONG_S) == signs[-1][0] + window_s + POLL_S


def test_a_change_of_state_is_a_sign_of_life() -> None:
    states = [(0, Pending(), ""), (100, Pending(name="Submitting"), ""), (200, Running(), ""), (220, Cancelling(), "")]
    assert lost_after(states, LONG_S) == 220 + CANCELLED_AFTER_S + POLL_S


def test_other_machines_clocks_do_not_matter() -> None:
    state: State[Any] = Running()
    old = state.model_copy(update={"timestamp": LONG_AGO})
    assert lost_after([(0, old, "a")], LOST_AFTER_S) == math.inf


def test_a_gap_between_two_looks_restarts_the_window() -> None:
    """The server was away, or the watcher's machine slept. The window begins again when the watcher can look."""
    watch, running = ProcessWatch(), Running()
    for now in (0.0, LOST_AFTER_S - 1, LOST_AFTER_S - 1 + LONGEST_GAP_S + 1, 1000.0, 2000.0):
        assert judge(watch, running, "a", now) is ProcessVerdict.ALIVE
    back = 2000.0
    while judge(watch, running, "a", back) is ProcessVerdict.ALIVE:
        back += POLL_S
    assert back == 2000.0 + LOST_AFTER_S + POLL_S


def test_a_slow_server_does_not_keep_the_dead_alive() -> None:
    watch, running, now = ProcessWatch(), Running(), 0.0
    while judge(watch, running, "a", now) is ProcessVerdict.ALIVE:
        now += LONGEST_GAP_S - 1
        assert now < 2 * LOST_AFTER_S


def test_a_process_that_gave_a_sign_is_not_believed_to_have_vanished() -> None:
    watch, vanished = ProcessWatch(), Crashed(name="Vanished")
    judge(watch, Running(), "a", 0.0)
    assert judge(watch, vanished, "a", 1.0) is ProcessVerdict.ENDED
    judge(watch, Running(), "b", 2.0)
    assert judge(watch, vanished, "b", 2.0 + DOUBTED_FOR_S) is ProcessVerdict.ALIVE
    assert judge(watch, vanished, "b", 2.5 + DOUBTED_FOR_S) is ProcessVerdict.ENDED


def test_after_the_server_was_away_a_vanished_process_has_time_for_a_sign() -> None:
    watch, vanished, back = ProcessWatch(), Crashed(name="Vanished"), LONGEST_GAP_S + 1
    judge(watch, Running(), "a", 0.0)
    assert judge(watch, vanished, "a", back) is ProcessVerdict.ALIVE
    assert judge(watch, vanished, "a", back + DOUBTED_FOR_S) is ProcessVerdict.ALIVE
    assert judge(watch, vanished, "a", back + DOUBTED_FOR_S + POLL_S) is ProcessVerdict.ENDED


def test_a_new_watch_believes_that_a_process_has_vanished() -> None:
    assert judge(ProcessWatch(), Crashed(name="Vanished"), "a", 0.0) is ProcessVerdict.ENDED


@pytest.mark.parametrize(
    ("state", "name", "message"),
    [
        (Running(), "Vanished", "no sign of life for 31 s: its process, or its machine, is gone"),
        (Pending(), "Vanished", "a worker took this flow run, but did not start it"),
        (InfrastructurePending(), "Vanished", "the cluster found no machine for this flow run"),
        (Cancelling(), "Cancelled", "its process was gone already"),
    ],
)
def test_a_lost_flow_run_gets_a_final_state_that_fits(state: State[Any], name: str, message: str) -> None:
    lost = state_of_lost(state, 31.0)
    assert (lost.name, lost.is_final()) == (name, True)
    assert message in str(lost.message)


def test_the_description_of_a_wait_says_what_to_do() -> None:
    assert "python -m deployments.worker gpu" in describe_wait(flow_run(Scheduled()))
    assert "than its concurrency limit allows" in describe_wait(flow_run(AwaitingConcurrencySlot()))
    assert "is being started by a worker" in describe_wait(flow_run(Pending()))
    assert "its cluster to find a machine" in describe_wait(flow_run(InfrastructurePending()))
    assert "until a person resumes it" in describe_wait(flow_run(Paused()))
    assert describe_wait(flow_run(Running())) == ""


def test_a_cancel_by_a_concurrency_limit_is_told_from_a_persons() -> None:
    refused = Cancelled(message="Deployment concurrency limit reached.")
    assert describe_turned_away(refused) == "Deployment concurrency limit reached"
    others = [Cancelled(), Cancelled(message="by a person"), Crashed(message=refused.message), Running(), None]
    assert {describe_turned_away(state) for state in others} == {""}


def test_a_cancel_waits_for_the_workers_signal_and_a_pause_does_not() -> None:
    """A live worker signals its process within seconds. Without a worker, the process reacts to the cancel itself."""
    request, cancelling = Request(lambda: None, 25.0), Cancelling()
    assert request.judge(Running(), 0.0) is None
    assert request.judge(cancelling, 1.0) is None
    assert request.state is None
    notice = request.judge(cancelling, 1.0 + SIGNALLED_WITHIN_S)
    assert notice is not None
    assert notice.is_at_once
    assert (notice.reason, notice.within_s) == ("a person has cancelled this attempt", 25.0)
    assert request.state is cancelling
    assert Request(lambda: None, 25.0).judge(Cancelled(), 0.0) is not None
    assert Request(lambda: None, 25.0).judge(Paused(), 0.0) is not None


@pytest.mark.parametrize(("text", "every_s"), [("", 3.0), ("1", 1.0), ("2.5", 2.5), ("10", 10.0)])
def test_the_interval_of_signs_of_life_can_be_set(monkeypatch: pytest.MonkeyPatch, text: str, every_s: float) -> None:
    monkeypatch.setenv("HOLDFAST_HEARTBEAT_S", text)
    assert read_seconds("HOLDFAST_HEARTBEAT_S", 3.0, 1.0, 10.0, "") == every_s


@pytest.mark.parametrize("text", ["0.5", "11", "nan", "ten", "-3"])
def test_a_wrong_interval_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HOLDFAST_HEARTBEAT_S", text)
    with pytest.raises(SystemExit, match=f"HOLDFAST_HEARTBEAT_S is '{text}', not a number of seconds from 1 to 10"):
        read_seconds("HOLDFAST_HEARTBEAT_S", 3.0, 1.0, 10.0, "")
