"""Which processes run, which are dead and only wait for their parent, and how much memory is left for new ones."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.machine import processes
from holdfast.machine.processes import find_free_memory, is_running, measure_memory, read_process
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


def test_files_that_the_kernel_remembers_are_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("max", "1000"), ("current", "900"), ("stat", "anon 200\ninactive_file 600\nactive_file 50\n")):
        (tmp_path / f"memory.{name}").write_text(text, "utf-8")
    files = (str(tmp_path / "memory.max"), str(tmp_path / "memory.current"))
    monkeypatch.setattr(processes, "CGROUP_MEMORY", (files,))
    assert find_free_memory() == 700
    (tmp_path / "memory.max").write_text("max", "utf-8")
    assert find_free_memory() > 700
    assert measure_memory([os.getpid(), 0]) > 2**20
