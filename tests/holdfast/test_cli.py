"""The command ``holdfast``, on a store that was made by hand."""

import hashlib
import json
from pathlib import Path

import pytest

from holdfast.cli import app, run_app
from holdfast.journal import Journal
from holdfast.store import open_store
from tests.makers import make_line, train


@pytest.fixture
def store(tmp_path: Path) -> str:
    train(make_line(open_store(str(tmp_path)), "a", epochs=1))
    Journal(open_store(str(tmp_path)), "begun").begin("m:f")
    (tmp_path / "no run").mkdir()
    return str(tmp_path)


def test_runs(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["runs", store, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["run"], run["complete"], run["step"]) for run in runs] == [("a", True, 10), ("begun", False, 0)]
    assert run_app(app, ["runs", store]) == 0
    assert "10 of 10" in capsys.readouterr().out
    assert run_app(app, ["runs", f"{store}/nowhere"]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_a_run_that_is_to_go_on_is_not_complete(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(open_store(store), "a").record_config("0" * 64, {}, {"epochs": 2})
    assert run_app(app, ["show", f"{store}/a", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["complete"], shown["step"], shown["total_steps"]) == (False, 10, 20)


def test_show(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["show", f"{store}/a", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    payload = Path(store, "a", "epoch-0001", "checkpoint.safetensors").read_bytes()
    assert shown["checkpoint_sha256"] == hashlib.sha256(payload).hexdigest()
    assert {name: shown[name] for name in ("run", "complete", "step", "epoch", "commit", "attempts")} == {
        "run": "a", "complete": True, "step": 10, "epoch": 1, "commit": 1, "attempts": 1,
    }  # fmt: skip
    assert run_app(app, ["show", f"{store}/a/"]) == 0
    assert shown["checkpoint_sha256"] in capsys.readouterr().out


def test_verify(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["verify", f"{store}/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    payload = Path(store, "a", "epoch-0001", "checkpoint.safetensors")
    good = payload.read_bytes()
    payload.write_bytes(good[:-1] + b"x")
    bad = hashlib.sha256(payload.read_bytes()).hexdigest()
    assert run_app(app, ["verify", f"{store}/a"]) == 2
    out = capsys.readouterr().out
    assert f"checkpoint.safetensors is {bad} but was committed as {hashlib.sha256(good).hexdigest()}" in out
    assert run_app(app, ["verify", f"{store}/a", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["damaged"][0]["name"] == "checkpoint.safetensors"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["shwo"], "show"),
        (["show"], "requires an argument"),
        (["show", "nowhere/run"], "there is no run 'run' in"),
        (["show", "/"], "is not a run"),
        (["runs", "http://host"], "http:// is not known to create a name once"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_1(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert error in err
    assert "Traceback" not in err


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "RUN is <store>/<run>" in out
    assert "2 damage found" in out
