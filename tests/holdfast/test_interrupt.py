"""Ctrl-C is not lost, wherever it strikes."""

import contextlib
import signal
import threading

import pytest

from holdfast.interrupt import remembered_interrupt


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with remembered_interrupt() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_raised_at_once_too() -> None:
    with remembered_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_anothers_handler_and_other_threads_are_left_alone() -> None:
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(1))
    try:
        with remembered_interrupt() as check:
            signal.raise_signal(signal.SIGINT)
            check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [1]

    def elsewhere() -> None:
        with remembered_interrupt() as check:
            check()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
