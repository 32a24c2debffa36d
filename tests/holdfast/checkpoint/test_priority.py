"""The threads of a save have a low priority until a caller waits for the save."""

import contextlib
import os
import sys
import threading

import pytest

from holdfast.checkpoint import CheckpointSave, Saver
from holdfast.memory import Priority
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS
from tests.support.parts import PART_BYTES, STATE
from tests.support.waiting import await_equal


def may_raise_priority() -> bool:
    """Return whether a thread of this process may have its priority lowered and raised again."""
    found = []

    def lower_and_raise() -> None:
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual)
            found.append(True)

    if sys.platform == "linux":  # elsewhere it would be the whole process
        thread = threading.Thread(target=lower_and_raise)
        thread.start()
        thread.join()
    return bool(found)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a thread has a priority of its own on Linux only")
def test_a_save_has_a_low_priority_until_a_caller_waits_for_it(folder: LocalStore, gate: threading.Event) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)

    def found() -> set[int]:
        threads = [each for each in threading.enumerate() if each.name.startswith(("save_", "hash_", "write_"))]
        return {os.getpriority(os.PRIO_PROCESS, each.native_id or 0) for each in threads}

    for is_urgent in (False, True):
        gate.clear()
        saver = Saver(PART_BYTES)
        fields = METADATA_FIELDS | {"optimizer_steps_total": 20 if is_urgent else 10}
        saver.begin(CheckpointSave(folder, to_payload(STATE), fields, "", is_urgent=is_urgent))
        await_equal(found, {usual} if is_urgent else {19})
        waiting = threading.Thread(target=saver.wait)
        waiting.start()
        if may_raise_priority():
            await_equal(found, {usual})
        gate.set()
        waiting.join()
        assert os.getpriority(os.PRIO_PROCESS, 0) == usual


@pytest.mark.skipif(
    not may_raise_priority(), reason="only root may raise a priority on Linux, and not in every container"
)
def test_a_thread_that_starts_during_restore_gets_the_usual_priority() -> None:
    usual, priority, found = os.getpriority(os.PRIO_PROCESS, 0), Priority(), list[int]()

    def begin_another() -> None:
        priority.lower()
        other = threading.Thread(target=end)
        other.start()  # as low as this one
        other.join()

    def end() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        priority.restore()
        priority.lower()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=begin_another)
    thread.start()
    thread.join()
    assert found == [19, usual]
