"""Tests of the ledger of ``make up``: it knows its own processes, and ends no others."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deployments import ledger
from deployments.ledger import ProcessLedger, began_at, children_of, end_processes, is_recorded_process
from tasks import processes
from tests.support.waiting import await_equal

WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a live process that leads a session, as those of the ledger do."""
    with subprocess.Popen(WAITS, start_new_session=True) as process:
        yield process
        process.kill()


def read_by_ps(pid: int) -> str:
    """Return a process's start time as earlier versions recorded it."""
    if not shutil.which("ps"):
        pytest.skip("this machine has no ps")
    environment = os.environ | {"LC_ALL": "C", "TZ": "UTC0"}
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_process_is_recognized(process: "subprocess.Popen[bytes]") -> None:
    assert is_recorded_process(process.pid, began_at(process.pid))
    assert not is_recorded_process(os.getpid(), began_at(process.pid))


def test_a_process_is_recognized_after_the_clock_was_set(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting the clock changes the time of the boot, as the kernel reports it, and nothing else."""
    began = began_at(process.pid)
    create_time, boot_time = psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 3600)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + 3600)
    assert is_recorded_process(process.pid, began)


def test_a_process_of_another_boot_is_another_process(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began = began_at(process.pid)
    monkeypatch.setattr(processes, "BOOT_ID", tmp_path / "boot_id")
    assert is_recorded_process(process.pid, began_at(process.pid))
    assert not is_recorded_process(process.pid, began)


def test_a_dead_process_is_not_running(process: "subprocess.Popen[bytes]") -> None:
    began = began_at(process.pid)
    process.kill()
    await_equal(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, True)
    assert not is_recorded_process(process.pid, began)  # nobody has waited for it yet
    assert began_at(process.pid) == ""
    process.wait()
    assert not is_recorded_process(process.pid, began)
    assert not is_recorded_process(process.pid, "")


def test_a_dying_process_is_running(dying: "subprocess.Popen[bytes]") -> None:
    """It is in this state for some milliseconds: its server's port is still taken."""
    began = began_at(dying.pid)
    assert is_recorded_process(dying.pid, began)
    dying.kill()
    await_equal(lambda: is_recorded_process(dying.pid, began), False)


def test_the_record_of_a_version_that_asked_ps_is_understood(process: "subprocess.Popen[bytes]") -> None:
    assert is_recorded_process(process.pid, read_by_ps(process.pid))


@pytest.mark.parametrize("began", ["Mon Nov 23 08:31:59 2020", "", "?", "Mon", "a b c d e", "- ", "- x", "nan nan"])
def test_a_record_that_fits_no_start_time_ends_nothing(
    began: str, process: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    known = ProcessLedger(tmp_path)
    known.add("server", process.pid)
    known.known["server"]["began"] = began
    assert end_processes(known, ["server"]) == []
    assert process.poll() is None
    assert known.known == {}


def test_processes_are_ended_together(tmp_path: Path) -> None:
    known = ProcessLedger(tmp_path)
    names = ["one", "two", "three"]
    for name in names:
        ledger.launch_process(known, name, WAITS, {})
    known.add("gone", 2**22 + 1)
    assert end_processes(known, [*names, "gone"]) == names
    assert ProcessLedger(tmp_path).known == {}
    assert [process.wait() for process in known.processes] == [-signal.SIGTERM] * 3


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "DOWN_WITHIN_S", 0.5)
    known = ProcessLedger(tmp_path)
    ready = tmp_path / "ready"
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w'); signal.pause()"
    ledger.launch_process(known, "server", [sys.executable, "-c", program], {})
    await_equal(ready.exists, True)
    assert end_processes(known, ["server"]) == ["server"]
    assert known.processes[0].wait() == -signal.SIGKILL


# A worker that starts a flow run, and another one as soon as that has ended. A flow run takes a while to save.
SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit()))
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""
WORKER = f"""
import pathlib, subprocess, sys
number = 0
while True:
    pathlib.Path(sys.argv[1], f"started-{{number}}").touch()
    subprocess.run([sys.executable, "-c", {SAVES!r}, str(pathlib.Path(sys.argv[1], f"listens-{{number}}"))])
    pathlib.Path(sys.argv[1], f"ended-{{number}}").touch()
    number += 1
"""


def test_a_worker_starts_no_flow_run_while_its_own_are_ended(tmp_path: Path) -> None:
    known = ProcessLedger(tmp_path)
    ledger.launch_process(known, "worker-gpu-0", [sys.executable, "-c", WORKER, str(tmp_path)], {})
    pid = known.processes[0].pid
    await_equal((tmp_path / "listens-0").exists, True)
    assert len(children_of(pid)) == 1
    assert end_processes(known, ["worker-gpu-0"]) == ["worker-gpu-0"]
    assert known.processes[0].wait() == -signal.SIGTERM
    assert not (tmp_path / "started-1").exists()


def test_no_program_of_the_machine_is_needed(
    process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert is_recorded_process(process.pid, began_at(process.pid))
    assert process.pid in children_of(os.getpid())
