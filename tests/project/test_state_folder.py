"""Tests of the state folder of ``make up``: one owner, one secret, one checkout at a time."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments import ledger
from deployments.ledger import ROOT, ProcessLedger, check_current, check_owner, locked
from holdfast.errors import ConfigError
from tasks.credentials import STARTED, make_secret, new_auth, open_state


@pytest.fixture
def pid() -> Iterator[int]:
    """Yield a live process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_nobody_else_may_enter_the_state_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    open_state(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    open_state(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_another_users_state_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_state(tmp_path / "state")
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "state").stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to the user with the id") as refused:
        open_state(tmp_path / "state")
    assert "HOLDFAST_STATE" in refused.value.hint


def test_a_folder_that_can_not_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be created"):
        open_state(tmp_path / "file" / "state")


def test_a_secret_is_made_once_and_atomically(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(make_secret(tmp_path / "auth", new_auth()))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(tmp_path / "auth").read_text()] * 16
    assert len(found[0]) > 64
    assert (tmp_path / "auth").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["auth"]


def test_a_second_checkout_is_refused_and_told_whose_it_is(
    tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first checkout", tmp_path / "second"
    first.mkdir()
    monkeypatch.setattr(ledger, "ROOT", first)
    ProcessLedger(tmp_path).add("server", pid, checkout=str(first), url="http://127.0.0.1:4200/api")
    check_owner(ProcessLedger(tmp_path))
    check_current(ProcessLedger(tmp_path))
    monkeypatch.setattr(ledger, "ROOT", second)
    with pytest.raises(ConfigError, match=f"started from the checkout {first}, not from {second}") as refused:
        check_owner(ProcessLedger(tmp_path))
    assert f"make -C '{first}' down" in refused.value.hint
    assert "HOLDFAST_STATE=" in refused.value.hint
    first.rmdir()  # the checkout was moved or deleted: make down is allowed, make up is not
    check_owner(ProcessLedger(tmp_path))
    with pytest.raises(ConfigError, match="which is gone"):
        check_current(ProcessLedger(tmp_path))


def test_dead_processes_belong_to_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        ProcessLedger(tmp_path).add("server", process.pid, checkout=str(tmp_path / "first"))
    check_owner(ProcessLedger(tmp_path))
    check_current(ProcessLedger(tmp_path))


def test_a_server_without_authentication_does_not_stay(tmp_path: Path, pid: int) -> None:
    """The make up of an earlier version started this server."""
    ProcessLedger(tmp_path).add("server", pid, url="http://127.0.0.1:4200/api")
    check_owner(ProcessLedger(tmp_path))
    with pytest.raises(ConfigError, match="without authentication") as refused:
        check_current(ProcessLedger(tmp_path))
    assert refused.value.hint == "run make down, then try again"


def test_two_commands_at_once_exclude_each_other(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match="another make up or make down"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_commands_find_the_secret_only_of_the_server_of_make_up(tmp_path: Path) -> None:
    url = "http://127.0.0.1:4200/api"
    secret = make_secret(tmp_path / "auth", new_auth())
    (tmp_path / STARTED).write_text(json.dumps({"server": {"url": url}}))
    show = "import os, tasks.untracked; print(os.environ.get('PREFECT_API_AUTH_STRING'))"
    for asked, own, found in (
        (url, "", secret),
        (f"{url}/", "", secret),
        ("http://127.0.0.1:4201/api", "", "None"),
        ("https://api.prefect.cloud/api", "", "None"),
        ("", "", "None"),
        (url, "mine:own", "mine:own"),
    ):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        chosen = {"PREFECT_API_URL": asked} | ({"PREFECT_API_AUTH_STRING": own} if own else {})
        done = subprocess.run(
            [sys.executable, "-c", show],
            env=inherited | chosen | {"HOLDFAST_STATE": str(tmp_path)},
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == found


def test_nobody_else_may_read_a_file_in_the_state_folder(tmp_path: Path) -> None:
    open_state(tmp_path)
    (tmp_path / "prefect.db").touch(0o644)
    (tmp_path / "program").touch(0o755)
    open_state(tmp_path)
    book = ProcessLedger(tmp_path)
    book.add("this", os.getpid())
    writes = [
        sys.executable,
        "-c",
        "import pathlib; print(1); pathlib.Path('made').touch(); pathlib.Path('in').mkdir()",
    ]
    ledger.launch_process(book, "server", ["sh", "-c", f'cd {tmp_path} && exec "$@"', "sh", *writes], {}, umask=0o077)
    assert book.processes[0].wait() == 0
    rights = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert rights.pop("in") == rights.pop("program") == 0o700
    assert set(rights) == {"prefect.db", "started.json", "server.log", "made"}
    assert set(rights.values()) == {0o600}
