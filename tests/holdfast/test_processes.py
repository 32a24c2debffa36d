"""Which processes run, and which are dead and only wait for their parent."""

import os
import subprocess
import sys

import psutil

from holdfast.processes import is_running, read_process
from tests.support.waiting import await_equal


def test_this_process_runs() -> None:
    assert is_running(os.getpid())
    assert read_process(os.getpid())[0] == "R"
    assert read_process(os.getpid())[1] > 0


def test_a_process_that_nobody_has_waited_for_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        await_equal(lambda: psutil.Process(process.pid).status(), psutil.STATUS_ZOMBIE)
        assert not is_running(process.pid)
    assert not is_running(process.pid)
    assert read_process(process.pid) == ("", 0.0)


def test_a_dying_process_runs(dying: "subprocess.Popen[bytes]") -> None:
    """Its memory and its GPU are still taken."""
    assert is_running(dying.pid)
    dying.kill()
    await_equal(lambda: is_running(dying.pid), False)
