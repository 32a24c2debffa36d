"""Tests of the signs of life that a flow run gives, without a server."""

import contextlib
import threading
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError

from tasks import heartbeat
from tasks.heartbeat import TRY_AGAIN_AFTER_S, renew_label
from tests.support.waiting import WITHIN_S

FLOW_RUN = FlowRun(flow_id=uuid4())


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.time, "sleep", lambda _: None)


def answering(*statuses: int) -> Any:
    """Return a client whose server gives these answers to requests for a new label, one after the other."""
    answers = []
    for status in statuses:
        request = httpx.Request("PATCH", "http://server/api")
        response = httpx.Response(status, request=request)
        error = PrefectHTTPStatusError("refused", request=request, response=response)
        answers.append(None if status == httpx.codes.NO_CONTENT else error)
    return Mock(update_flow_run_labels=Mock(side_effect=answers))


def test_a_busy_server_is_asked_again_for_the_same_sign_of_life() -> None:
    client = answering(503, 503, 204)
    renew_label(client, FLOW_RUN)
    calls = client.update_flow_run_labels.call_args_list
    assert len(calls) == 3
    assert calls[0] == calls[1] == calls[2]


@pytest.mark.parametrize(("statuses", "tries"), [([503] * 9, len(TRY_AGAIN_AFTER_S) + 1), ([404], 1)])
def test_a_server_that_refuses_for_good_is_an_error(statuses: list[int], tries: int) -> None:
    client = answering(*statuses)
    with pytest.raises(PrefectHTTPStatusError):
        renew_label(client, FLOW_RUN)
    assert client.update_flow_run_labels.call_count == tries


def test_events_come_while_the_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automation waits for events alone: it would call a process vanished that only waits for an answer."""
    emitted, asked, answers, enough = [], threading.Event(), threading.Event(), threading.Event()

    def emit(name: str, resource: dict[str, str]) -> None:
        emitted.append(name)
        if len(emitted) >= 5:
            enough.set()

    def wait_for_an_answer(*_: Any) -> None:
        asked.set()
        answers.wait()

    client = Mock(update_flow_run_labels=wait_for_an_answer)
    monkeypatch.setattr(heartbeat, "get_client", lambda **_: contextlib.nullcontext(client))
    monkeypatch.setattr(heartbeat, "emit_event", emit)
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.001)
    own = FLOW_RUN.model_copy(update={"deployment_id": uuid4()})
    monkeypatch.setattr(FlowRunContext, "get", lambda: Mock(flow_run=own))
    with heartbeat.heartbeat():
        assert asked.wait(WITHIN_S)
        assert enough.wait(WITHIN_S), "no event came before the answer"
        answers.set()
    assert emitted[-1] == heartbeat.LAST_EVENT
