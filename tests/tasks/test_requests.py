"""Tests of how often the server is asked: pollers share what one of them has read, and a watch slows down."""

import contextlib
import threading
import uuid
from typing import Any
from unittest.mock import Mock

import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.events.schemas.automations import EventTrigger
from prefect.exceptions import ObjectNotFound, Pause
from prefect.states import Cancelling, Completed, Crashed, Paused, Running

from deployments.automations import describe_automations
from tasks import heartbeat, own_run, pool
from tasks.own_run import RECENT, SHARED_FOR_S, Asked, raise_if_paused, read_own_state


class Server:
    """A server that tells the own flow run's state, and counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: State[Any] = Running()
        self.asked, self.now, self.set = 0, 1000.0, list[State[Any]]()
        self.also: dict[uuid.UUID, FlowRun] = {}
        self.flow_run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), deployment_id=uuid.uuid4())
        context = Mock(client=self)
        monkeypatch.setattr(own_run, "SyncClientContext", Mock(get_or_create=lambda: contextlib.nullcontext(context)))
        monkeypatch.setattr(FlowRunContext, "get", lambda: Mock(flow_run=self.flow_run))
        monkeypatch.setattr(own_run.time, "monotonic", lambda: self.now)

    def read_flow_run(self, flow_run_id: uuid.UUID) -> FlowRun:
        assert flow_run_id == self.flow_run.id
        self.asked += 1
        return self.flow_run.model_copy(update={"state": self.state})

    def read_flow_runs(self, flow_run_filter: FlowRunFilter) -> list[FlowRun]:
        assert flow_run_filter.id is not None
        self.asked += 1
        known = self.also | {self.flow_run.id: self.flow_run.model_copy(update={"state": self.state})}
        return [known[each] for each in flow_run_filter.id.any_ or () if each in known]

    def set_flow_run_state(self, flow_run_id: uuid.UUID, state: State[Any], force: bool) -> None:
        self.set.append(state)

    def deny(self) -> None:
        """Let the heartbeat look for a false verdict, as it does with each beat."""
        heartbeat.deny_that_it_vanished(self, self.flow_run)  # type: ignore[arg-type]


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_all_pollers_of_a_moment_cost_one_request(own_server: Server) -> None:
    asked = Asked(60.0)
    own_server.deny()
    assert [source() for source in asked.sources] == [None]
    raise_if_paused()
    assert own_server.asked == 1


def test_a_state_is_read_again_when_it_is_no_longer_new(own_server: Server) -> None:
    raise_if_paused()
    own_server.state = Paused()
    own_server.now += SHARED_FOR_S - 0.01
    raise_if_paused()
    own_server.now += 0.02
    with pytest.raises(Pause):
        raise_if_paused()
    assert own_server.asked == 2


def test_after_a_signal_the_server_itself_is_asked(own_server: Server) -> None:
    own_server.deny()
    own_server.state = Cancelling()
    assert own_run.is_being_cancelled()
    assert read_own_state() == own_server.state


def test_a_false_verdict_is_read_again_before_it_is_denied(own_server: Server) -> None:
    """A person may have cancelled the flow run since a poller has read the verdict."""
    own_server.state = Crashed(name="Vanished")
    read_own_state()
    own_server.state = Cancelling()
    own_server.deny()
    assert own_server.set == []
    own_server.state = Crashed(name="Vanished")
    own_server.now += SHARED_FOR_S + 0.01
    own_server.deny()
    assert [state.type.value for state in own_server.set] == ["RUNNING"]


def test_the_end_of_a_heartbeat_forgets_the_state(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "emit_event", lambda *_: None)
    monkeypatch.setattr(
        heartbeat, "get_client", lambda **_: contextlib.nullcontext(Mock(read_flow_run=own_server.read_flow_run))
    )
    with heartbeat.heartbeat():
        read_own_state()
    assert RECENT.find(own_server.flow_run.id, 1e9) is None


def test_a_watch_reads_both_flow_runs_in_one_request(own_server: Server) -> None:
    watched = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="toy attempt 1", state=Running())
    own_server.also[watched.id] = watched
    assert pool._read_with_own(own_server, watched.id) == watched  # type: ignore[arg-type]
    raise_if_paused()
    own_server.deny()
    assert own_server.asked == 1
    del own_server.also[watched.id]
    with pytest.raises(ObjectNotFound):
        pool._read_with_own(own_server, watched.id)  # type: ignore[arg-type]


def test_every_second_beat_renews_the_label(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    done, renewed = threading.Event(), list[int]()
    client = Mock(update_flow_run_labels=lambda *_: renewed.append(own_server.asked))

    def read(flow_run_id: uuid.UUID) -> FlowRun:
        own_server.now += 3.0
        if own_server.asked == 5:
            done.set()
        return own_server.read_flow_run(flow_run_id)

    client.read_flow_run = read
    monkeypatch.setattr(heartbeat, "get_client", lambda **_: contextlib.nullcontext(client))
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.0)
    heartbeat._renew_labels(own_server.flow_run, {}, done)
    assert renewed == [0, 2, 4]


def test_a_cancelled_flow_run_says_that_it_lives(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    done, emitted = threading.Event(), list[str]()

    def read(flow_run_id: uuid.UUID) -> FlowRun:
        own_server.now += 3.0
        if own_server.asked == 2:
            own_server.state = Cancelling()
        if own_server.asked == 4:
            done.set()
        return own_server.read_flow_run(flow_run_id)

    client = Mock(read_flow_run=read)
    monkeypatch.setattr(heartbeat, "get_client", lambda **_: contextlib.nullcontext(client))
    monkeypatch.setattr(heartbeat, "emit_event", lambda name, _: emitted.append(name))
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.0)
    heartbeat._renew_labels(own_server.flow_run, {}, done)
    assert emitted == [heartbeat.CANCELLING_EVENT] * 3


def test_one_automation_alone_takes_every_heartbeat() -> None:
    """Each automation that expects an event costs the server a transaction for it."""
    triggers = [automation.trigger for automation in describe_automations()]
    assert sum(isinstance(each, EventTrigger) and heartbeat.EVENT in each.expect for each in triggers) == 1


def test_a_watched_attempt_is_read_seldom_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 attempts at two readings a second were a thousand requests a second."""
    now, times = 1000.0, list[float]()
    running, ended = Running(), Completed()
    flow_run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="toy attempt 1")

    def read(*_: Any) -> FlowRun:
        times.append(now)
        return flow_run.model_copy(update={"state": running if now < 1600 else ended})

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(pool, "refresh", read)
    monkeypatch.setattr(pool, "raise_if_paused", lambda: None)
    monkeypatch.setattr(pool.time, "monotonic", lambda: now)
    monkeypatch.setattr(pool.time, "sleep", sleep)
    assert pool.await_end(flow_run).state == ended
    assert len(times) <= 600 / pool.WATCH_EVERY_S + pool.NEW_FOR_S / pool.POLL_EVERY_S
    assert times[1] - times[0] == pool.POLL_EVERY_S


def test_an_attempt_beats_as_its_watcher_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    monkeypatch.setattr(pool, "_start", lambda *given, **_: started.append(given[4]) or Mock(state=Running()))
    config = Mock(store="runs", run="toy", where="gpu")
    pool.start_attempt(config, 1, environment={"A": "1"})
    monkeypatch.setattr(pool, "EVERY_S", 10.0)
    pool.start_attempt(config, 2, environment={"A": "1"})
    assert started == [{"A": "1", "HOLDFAST_HEARTBEAT_S": "3"}, {"A": "1", "HOLDFAST_HEARTBEAT_S": "10"}]
