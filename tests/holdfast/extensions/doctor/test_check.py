"""Tests of ``holdfast doctor --store``: its output, its exit code, and that a stop leaves nothing on the store."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import app, run_app
from holdfast.store import open_store
from holdfast.store.memory import MemoryStore
from holdfast.store.rights import RIGHTS
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support import faulty


def say(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> str:
    capsys.readouterr()
    assert run_app(app, ["doctor", "--store", *arguments]) == exit_code
    return capsys.readouterr().out


def test_each_verb_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *lines, empty, conclusion = say(capsys, str(tmp_path / "runs")).splitlines()
    assert [line[:15].rstrip() for line in lines] == list(RIGHTS["disk"])
    assert all(re.fullmatch(r"ok +\d+ ms|not offered +the storage .*", line[17:]) for line in lines)
    assert (empty, conclusion) == ("", f"a run can use {tmp_path}/runs")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_right_is_named(
    s3_server: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(method: str, path: str, headers: object) -> str:
        return faulty.DENIED if method == "PUT" and "holdfast-check-" in path else ""

    with faulty.behind_faults(s3_server, "AWS_ENDPOINT_URL", choose) as proxy:
        bucket = faulty.use(proxy, monkeypatch)
        out = say(capsys, f"{bucket}/runs", exit_code=3)
        (line,) = [line for line in out.splitlines() if line.startswith("create  ")]
        assert re.search("denied +s3:PutObject is missing: can't write file in s3://.*me is not authorized", line)
        assert "missing: s3:PutObject\n" in out
        assert out.endswith(
            f"a run can't use {bucket}/runs: 1 operation failed, and 10 operations could not be tried\n"
        )
        assert open_store(bucket).list() == []


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(say(capsys, "memory://checked", "--json"))
    assert (shown["ok"], shown["store"]) == (True, "memory://checked")
    assert [trial["verb"] for trial in shown["trials"]] == list(RIGHTS["disk"])
    assert shown["trials"][0].keys() == {"verb", "outcome", "seconds", "rights", "message", "hint"}
    assert abs(shown["clock_s"]) < 2


@pytest.mark.parametrize("url", ["ftp://a/b", "s3://user:secret@bucket", "/a\0b"])
def test_a_wrong_url_is_wrong_use(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(capsys, url, exit_code=1) == ""


def test_a_clock_that_differs_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.extensions.doctor.stores.CLOCK_S", -1.0)
    assert re.search(r"the storage's clock is 0 s (ahead|behind)", say(capsys, "memory://clock"))


def test_what_is_left_behind_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "delete_folder", lambda self, folder: None)
    monkeypatch.setattr(MemoryStore, "delete", lambda self, name: None)
    assert run_app(app, ["doctor", "--store", "memory://left"]) == 3
    said = "not deleted: memory://left/holdfast-check-[0-9a-f]{16}; delete it yourself\n"
    assert re.fullmatch(said, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_leaves_nothing(
    number: int, exit_code: int, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request is slow, so that the stop meets one."""
    with faulty.behind_faults(s3_server, "AWS_ENDPOINT_URL", lambda *_: faulty.SLOW) as proxy:
        bucket = faulty.use(proxy, monkeypatch)
        command = [sys.executable, "-m", "holdfast.cli", "doctor", "--store", f"{bucket}/runs"]
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | proxy.environment, stdout=subprocess.PIPE) as process:
            assert process.stdout
            for line in process.stdout:
                if line.startswith(b"list after"):
                    process.send_signal(number)
                    break
            process.stdout.read()
            assert process.wait(COMMAND_WITHIN_S) == exit_code
        assert open_store(bucket).list() == []
