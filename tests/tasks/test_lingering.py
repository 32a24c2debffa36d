"""The temporary server that lives on between two commands."""

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, temporary_settings

from tasks.lingering import RECORD, VARIABLE, ServerRecord, await_unused, read_patience, read_server, shared_server
from tasks.processes import began_at
from tests.conftest import ROOT, MakeHome
from tests.support.waiting import WITHIN_S, await_equal

USE = """
import sys
from tasks.server import server
with server() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def start_command(home: Path, patience_s: float) -> "subprocess.Popen[str]":
    """Start a command that uses a server until its standard input ends, and prints the server's URL."""
    return subprocess.Popen(
        [sys.executable, "-c", USE],
        cwd=ROOT,
        env=os.environ | {"PREFECT_HOME": str(home), VARIABLE: str(patience_s)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_url(command: "subprocess.Popen[str]") -> str:
    assert command.stdout is not None
    return command.stdout.readline().strip()


def test_the_next_command_finds_the_server_of_a_killed_one(tmp_path: Path, make_home: MakeHome) -> None:
    home = make_home(tmp_path / "home")
    first = start_command(home, 2)
    url = read_url(first)
    record = read_server(home / RECORD)
    assert record is not None
    assert record.url == url
    assert stat.S_IMODE((home / RECORD).stat().st_mode) == 0o600
    with start_command(home, 2) as beside:  # while the first one lives
        assert read_url(beside) == url
        first.send_signal(signal.SIGKILL)
        out, _ = first.communicate()  # ends, although the server that the command started lives on
        assert out == ""
        later = httpx.get(f"{url}/admin/version", auth=tuple(record.auth.split(":")), timeout=WITHIN_S)
        assert later.is_success
    await_equal(lambda: began_at(record.pid), "")
    assert not (home / RECORD).exists()


@pytest.mark.parametrize("change", ["other settings", "dead", "another process", "none"])
def test_only_a_living_server_with_the_same_settings_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setenv(VARIABLE, "60")
    with subprocess.Popen(["sleep", "60"]) as process, shared_server(tmp_path) as shared:
        assert shared is not None
        assert shared.find() is None
        shared.record(process.pid, "http://127.0.0.1:1/api", "user:secret")
        if change == "another process":
            record = asdict(read_server(tmp_path / RECORD) or pytest.fail("no record"))
            (tmp_path / RECORD).write_text(json.dumps(record | {"pid": os.getpid()}))
        if change != "dead":
            with temporary_settings({PREFECT_API_REQUEST_TIMEOUT: 7} if change == "other settings" else {}):
                found = shared.find()
            assert (found is not None) == (change == "none")
        process.kill()
        process.wait()
        assert shared.find() is None


def write_record(folder: Path, pid: int) -> Path:
    file = folder / RECORD
    file.write_text(json.dumps(asdict(ServerRecord("http://127.0.0.1:1/api", "user:secret", pid, began_at(pid), ""))))
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("damage", ["none", "mode", "link", "text", "names"])
def test_a_record_is_read_only_if_its_user_alone_could_write_it(tmp_path: Path, damage: str) -> None:
    file = write_record(tmp_path, os.getpid())
    if damage == "mode":
        file.chmod(0o640)
    if damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    if damage == "text":
        file.write_text("{")
    if damage == "names":
        file.write_text('{"url": "http://127.0.0.1:1/api"}')
    assert (read_server(file) is not None) == (damage == "none")


def _hold(folder: Path, ready: Connection) -> None:
    os.environ[VARIABLE] = "60"
    with shared_server(folder) as shared:
        ready.send(shared is not None)
        ready.recv()


def test_a_server_lives_on_while_a_command_uses_it(tmp_path: Path) -> None:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    command = spawning.Process(target=_hold, args=(tmp_path, theirs))
    command.start()
    assert ours.recv()
    waiting = spawning.Process(target=_await_recorded, args=(tmp_path,))
    waiting.start()
    waiting.join(3)
    assert waiting.is_alive()
    ours.send(None)
    waiting.join(WITHIN_S)
    assert waiting.exitcode == 0
    command.join(WITHIN_S)
    assert not (tmp_path / RECORD).exists()


def _await_recorded(folder: Path) -> None:
    os.environ[VARIABLE] = "0.4"
    write_record(folder, os.getpid())
    await_unused(folder)


@pytest.mark.parametrize("newer", ["another server", "none"])
def test_a_server_that_is_no_longer_on_record_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: str
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    if newer == "another server":
        write_record(tmp_path, os.getppid())
    await_unused(tmp_path)
    assert (tmp_path / RECORD).exists() == (newer == "another server")


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "soon"])
def test_a_wrong_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(SystemExit, match=f"error: {VARIABLE} is '{text}', not a number.*\nhint: unset"):
        read_patience()
