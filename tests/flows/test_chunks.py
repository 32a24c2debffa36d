"""Tests of the tasks of an attempt: a signal that comes while Prefect is starting one of them."""

import contextlib
import signal
from typing import Any

import pytest
from prefect import task, task_engine
from prefect.exceptions import TerminationSignal

from tasks.chunks import ACTS, uncover


@task
def train() -> None:
    """Do nothing."""


@pytest.fixture(params=[TerminationSignal(signal.SIGTERM), KeyboardInterrupt()], ids=["SIGTERM", "Ctrl-C"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """Let a signal come while Prefect makes the run of a task, for which it needs a client, but asks no server.

    Return the class of the exception that the signal's handler raises.
    """

    class Client:
        client = None

        @classmethod
        def get_or_create(cls) -> Any:
            return contextlib.nullcontext(cls())

    def make_run(**_: Any) -> None:
        raise request.param

    monkeypatch.setattr(task_engine, "SyncClientContext", Client)
    monkeypatch.setattr(task_engine, "_create_task_run_locally", make_run)
    return type(request.param)


def test_a_signal_while_a_task_starts_is_not_taken_for_an_error_of_the_task(told: type[BaseException]) -> None:
    with pytest.raises(ValueError, match="Task run is not set"):
        train()  # Prefect's own way
    with pytest.raises(told):
        uncover(train)()


@pytest.mark.parametrize("act", [ACTS.open, ACTS.train_chunk])
def test_the_tasks_of_an_attempt_raise_such_a_signal(told: type[BaseException], act: Any) -> None:
    with pytest.raises(told):
        act(*[None] * (1 if act is ACTS.open else 2))


def test_an_error_that_hides_no_signal_stays() -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from None

    with pytest.raises(ValueError, match="second"):
        uncover(fail)()
