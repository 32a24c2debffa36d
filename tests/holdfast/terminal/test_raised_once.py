"""A second signal doesn't disturb what the first one has begun."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from holdfast.terminal import interrupt


class Told(BaseException):
    """The exception that the handler of these tests raises."""


def tell(number: int, frame: object) -> None:
    raise Told(number)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python calls the handler between two instructions


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    before = {each: signal.signal(each, tell) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_raises_nothing_until_the_block_ends(second: signal.Signals) -> None:
    done = []
    with interrupt.raised_once(60.0):
        with pytest.raises(Told):
            send(signal.SIGTERM)
        send(second)
        done.append("saved")
    assert done == ["saved"]
    with pytest.raises(Told):
        send(second)


def test_a_second_signal_raises_again_after_its_time() -> None:
    with interrupt.raised_once(0.2):
        for _ in range(2):
            with pytest.raises(Told):
                send(signal.SIGTERM)
            time.sleep(0.3)


def test_a_lost_signal_raises_nothing_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_came", [signal.SIGTERM])
    with interrupt.raised_once(60.0):
        with pytest.raises(SystemExit):
            interrupt.raise_if_lost()
        send(signal.SIGTERM)


def test_blocks_inside_each_other_let_one_signal_through() -> None:
    """As in Prefect's flow: a command has the first block, and a library sets a handler of its own inside it."""

    def tell_library(number: int, frame: object) -> None:
        raise Told("library")

    with interrupt.raised_once(60.0):
        with interrupt.raised_once(60.0), pytest.raises(Told, match="15"):
            send(signal.SIGTERM)
        send(signal.SIGTERM)
    with interrupt.raised_once(60.0):
        before = signal.signal(signal.SIGTERM, tell_library)
        with interrupt.raised_once(60.0):
            with pytest.raises(Told, match="library"):
                send(signal.SIGTERM)
            send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is tell_library
        signal.signal(signal.SIGTERM, before)
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is tell
