"""Tests of the command ``holdfast`` on a store that the tests write themselves."""

import hashlib
import io
import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.shown import to_shown
from holdfast.cli import app, run_app
from holdfast.cli.looking import _format_age
from holdfast.journal import Journal, format_time
from holdfast.journal.endings import Ending
from holdfast.journal.signature import load_signing_key
from holdfast.store import open_store
from tests.support.makers import (
    CONFIG,
    IDENTITY,
    SETTINGS,
    head_step,
    load,
    make_line,
    save_next,
    train,
)


@pytest.fixture
def store(tmp_path: Path) -> str:
    train(make_line(open_store(str(tmp_path)), "a", epochs=1))
    Journal(open_store(str(tmp_path)), "begun").begin("m:f")
    (tmp_path / "no run").mkdir()
    (tmp_path / "no run either.tar").write_text("")
    return str(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Return a run with five commits, of which retention keeps three."""
    line = make_line(open_store(str(tmp_path)), "long")
    for _ in range(5):
        train(line)
    return f"{tmp_path}/long"


def journal_of(run: str) -> Journal:
    store, _, name = run.rpartition("/")
    return Journal(open_store(store), name)


def damage(run: str, name: str) -> None:
    path = Path(run, name)
    path.write_bytes(b"?" + path.read_bytes()[1:])


def ask_json(*arguments: str, capsys: pytest.CaptureFixture[str], exit_code: int = 0) -> Any:
    capsys.readouterr()
    assert run_app(app, [*arguments, "--json"]) == exit_code
    return json.loads(capsys.readouterr().out)


def ask_rows(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the rows that a command prints, by their names."""
    capsys.readouterr()
    assert run_app(app, [*arguments]) == 0
    return dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())


def test_runs_lists_the_runs_of_a_store(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["show", "--store", store, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["run"], run["complete"], run["step"]) for run in runs] == [("a", True, 10), ("begun", False, 0)]
    assert run_app(app, ["show", "--store", store]) == 0
    assert "10 of 10" in capsys.readouterr().out
    assert run_app(app, ["show", "--store", f"{store}/a"]) == 0
    assert "no runs in" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_runs_of_a_misspelled_store_are_an_error(
    store: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (f"{store}/nowhere", f"{store}/a/run.json"):
        assert run_app(app, ["show", "--store", name, *options]) == 1
        assert f"error: there is no store {name}\nhint: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["show", "--store", ""],
        ["doctor", "--store", ""],
        ["doctor", "--store", "file://"],
        ["report", ""],
        ["watch", ""],
        ["unpack", "{tar}", " "],
    ],
)
def test_an_empty_store_is_not_the_current_folder(
    run: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = f"{tmp_path}/packed.tar"
    assert run_app(app, ["pack", run, tar]) == 0
    monkeypatch.chdir(Path(run).parent)
    assert run_app(app, [each.replace("{tar}", tar) for each in command]) == 1
    assert "it names no folder\nhint: give a folder or a URL; . is the current folder" in capsys.readouterr().err


@pytest.mark.parametrize("store", ["s3:/bucket/runs", "gs:bucket", "file:/tmp/runs", "az:", "memory:/x"])
def test_a_url_with_too_few_slashes_is_not_a_folder(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scheme, path = store.split(":")
    assert run_app(app, ["doctor", "--store", store]) == 1
    said = capsys.readouterr().err
    assert f"store = {store!r}: a URL has two slashes after {scheme}:\n" in said
    assert f"hint: give {scheme}://{path.lstrip('/')}; or ./{store} for a folder of this name\n" in said
    assert not [*tmp_path.iterdir()]
    assert open_store(f"./{store}").url == str(tmp_path / store.rstrip("/"))


def test_runs_shows_whole_names_in_columns(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_line(open_store(store), "n" * 100)
    assert run_app(app, ["show", "--store", store]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["a", "begun", "n" * 100]
    assert {row.index("no") for row in rows[1:]} == {header.index("complete")}


def test_a_run_that_is_damaged_hides_no_other(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_line(open_store(store), "damaged")
    damage(f"{store}/damaged", "run.json")
    assert run_app(app, ["show", "--store", store]) == 2
    shown = capsys.readouterr()
    assert [row.split()[0] for row in shown.out.splitlines()] == ["run", "a", "begun"]
    assert shown.err.startswith("run damaged: run.json can't be read")
    assert [run["run"] for run in ask_json("runs", store, capsys=capsys, exit_code=2)] == ["a", "begun"]


def test_an_extended_run_is_not_complete(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(open_store(store), "a").record_config("0" * 64, {}, {"epochs": 2})
    assert run_app(app, ["show", f"{store}/a", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["complete"], shown["step"], shown["total_steps"]) == (False, 10, 20)


def test_show_prints_the_state_of_a_run(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["show", f"{store}/a", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    payload = Path(store, "a", "epoch-0001", "checkpoint.safetensors").read_bytes()
    assert shown["checkpoint_sha256"] == hashlib.sha256(payload).hexdigest()
    assert {name: shown[name] for name in ("run", "complete", "step", "epoch", "commit", "attempts")} == {
        "run": "a", "complete": True, "step": 10, "epoch": 1, "commit": 1, "attempts": 1,
    }  # fmt: skip
    assert run_app(app, ["show", f"{store}/a/"]) == 0
    said = capsys.readouterr().out
    assert shown["checkpoint_sha256"] in said
    assert re.search("^keeps +the newest 3 checkpoints; the others are deleted after a commit$", said, re.M)


def test_the_best_commit_has_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = make_line(open_store(str(tmp_path)), "scored")
    for accuracy in (0.5, 0.9, 0.7):
        train(line, metrics={"accuracy": accuracy})
    run = f"{tmp_path}/scored"
    assert run_app(app, ["pin", run, "best"]) == 1
    assert "retention.keep_best is not set" in capsys.readouterr().err
    assert "best" not in ask_rows("show", run, capsys=capsys)

    def set_best(metric: str) -> None:
        kept = {"retention": {"keep_best": {"metric": metric, "mode": "max"}}}
        line.journal.record_config(SETTINGS, IDENTITY, CONFIG | kept)

    set_best("recall")
    assert run_app(app, ["pin", run, "best"]) == 1
    assert "none has the metric 'recall'" in capsys.readouterr().err
    set_best("accuracy")
    second = line.journal.read_commit(2)
    said = f"commit 2, step 20, accuracy 0.9, {second.checkpoint_sha256[:12]}, epoch-0002"
    assert ask_rows("show", run, capsys=capsys)["best"] == said
    assert ask_json("show", run, capsys=capsys)["best"] == {
        "commit": 2, "step": 20, "path": "epoch-0002", "checkpoint_sha256": second.checkpoint_sha256,
        "metric": "accuracy", "value": 0.9,
    }  # fmt: skip
    assert run_app(app, ["pin", run, "best"]) == 0
    assert capsys.readouterr().out.startswith("commit 2 (epoch-0002) is pinned")
    assert run_app(app, ["compare", f"{run}@best", f"{run}@2"]) == 0
    for number in (2, 3):
        shutil.rmtree(tmp_path / "scored" / f"epoch-{number:04d}")
    rows, shown = ask_rows("show", run, capsys=capsys), ask_json("show", run, capsys=capsys)
    assert rows["best"] == f"{said}, which is lost: holdfast verify names the missing files"
    assert rows["stored"].split(maxsplit=1)[1].startswith("epoch-0003, which is lost: holdfast verify")
    assert (shown["best"]["is_gone"], shown["is_gone"]) == (True, True)


def test_show_names_and_saves_what_a_run_has_shown(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = make_line(open_store(store), "shows")
    for step in (10, 20):
        texts = [to_shown(name, f"{name} {step}", step, step // 10) for name in ("worst", "best")]
        train(line, shown=b"".join(text.to_line() for text in texts))
    saved = tmp_path / "saved"
    assert run_app(app, ["show", f"{store}/shows", "--save", str(saved)]) == 0
    rows = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
    assert rows["shown"] == "best (txt, step 20), worst (txt, step 20)"
    assert rows["saved"] == f"4 files in {saved}"
    assert {path.name: path.read_text("utf-8") for path in saved.iterdir()} == {
        f"{name}-{step:08d}.txt": f"{name} {step}" for name in ("worst", "best") for step in (10, 20)
    }
    (found,) = [each for each in ask_json("show", f"{store}/shows", capsys=capsys)["shown"] if each["name"] == "best"]
    assert found == {"name": "best", "type": "text/plain", "step": 20, "epoch": 2}
    damage(f"{store}/shows", "shown/00000002.jsonl")
    assert run_app(app, ["show", f"{store}/shows"]) == 0
    assert "shown/00000002.jsonl and commit 2 contradict each other" in capsys.readouterr().out


def test_verify_finds_damage(store: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_verify_names_each_checkpoint_and_counts(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, "epoch-0002/checkpoint.safetensors")
    Path(run, "latest.json").unlink()
    assert run_app(app, ["verify", run]) == 2
    *rows, note, problem, resume, summary, _ = capsys.readouterr().out.splitlines()
    assert resume == "resume: not rehearsed"
    assert [(row.split()[0], row.split()[2]) for row in rows] == [
        ("good", "epoch-0005"), ("good", "epoch-0004"), ("good", "epoch-0003"), ("damaged", "epoch-0002"),
        ("good", "epoch-0001"),
    ]  # fmt: skip
    assert note == "note: latest.json is missing; the next attempt writes it again"
    assert problem.startswith("problem: epoch-0002/checkpoint.safetensors is ")
    assert summary == "5 checkpoints and 19 records read, 1 problem"


def test_verify_all_shows_what_does_not_count(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    journal_of(run).quarantine(2, "damaged", 1)
    save_next(make_line(open_store(str(Path(run).parent)), "long"))
    assert run_app(app, ["verify", run]) == 0
    assert "quarantined" not in capsys.readouterr().out
    assert run_app(app, ["verify", run, "--all"]) == 0
    shown = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[2]) for row in shown[3:6]] == [
        ("quarantined", "epoch-0002"), ("good", "epoch-0001"), ("uncommitted", "epoch-0006"),
    ]  # fmt: skip
    assert " ".join(shown[6]) == "note: epoch-0006 is named by no commit"


def test_verify_deep_looks_into_checkpoints(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    commit = journal_of(run).read_commit(5).model_copy(update={"step": 51})
    Path(run, "commits/00000005.json").write_bytes(commit.to_bytes())
    assert run_app(app, ["verify", run]) == 0
    assert run_app(app, ["verify", run, "--deep"]) == 2
    assert "problem: epoch-0005: step was saved as 50 but committed as 51" in capsys.readouterr().out


# ---- keeping


def test_prune_reports_and_deletes(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["prune", run, "--dry-run"]) == 0
    *rows, summary = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["keeps"] * 3 + ["would"] * 2
    assert "would delete  " in rows[-1]
    assert rows[-1].endswith("epoch-0001")
    assert "(keep_last)" in rows[0]
    size_bytes = sum(journal_of(run).read_commit(number).size_bytes for number in (1, 2))
    assert summary == f"keeps 3 checkpoints, would delete 2 of {size_bytes / 1000:.1f} kB"
    assert Path(run, "epoch-0001").exists()

    dry = ask_json("prune", run, "--dry-run", capsys=capsys)
    assert ([entry["commit"] for entry in dry["pruned"]], dry["dry_run"]) == ([2, 1], True)
    report = ask_json("prune", run, capsys=capsys)
    assert dry | {"dry_run": False, "record_sha256": ""} == report | {
        "created_at": dry["created_at"],
        "record_sha256": "",
    }
    assert not Path(run, "epoch-0001").exists()
    assert run_app(app, ["prune", run]) == 0
    assert "keeps 3 checkpoints, deleted 0" in capsys.readouterr().out


def test_prune_of_a_run_without_commits(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["prune", f"{store}/begun"]) == 0
    assert capsys.readouterr().out == "the run has no commit yet\n"
    assert ask_json("prune", f"{store}/begun", capsys=capsys) is None


@pytest.mark.parametrize("which", ["1", "epoch-0001", "00000001"])
def test_a_pinned_checkpoint_stays_until_it_is_unpinned(
    run: str, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    assert run_app(app, ["pin", run, which]) == 0
    assert capsys.readouterr().out == "commit 1 (epoch-0001) is pinned: it is never pruned; --off unpins it\n"
    assert run_app(app, ["prune", run]) == 0
    assert "epoch-0001  (pinned)" in capsys.readouterr().out
    assert run_app(app, ["pin", run, which, "--off"]) == 0
    assert [entry["commit"] for entry in ask_json("prune", run, capsys=capsys)["pruned"]] == [1]
    assert run_app(app, ["pin", run, "1"]) == 1
    assert "the checkpoint of commit 1 of run 'long' was pruned" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["pin"], ["unpin"], ["quarantine"]])
def test_an_empty_name_is_no_commit(store: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It is a script's unset variable. To quarantine the newest checkpoint by it can't be undone."""
    run = f"{store}/named"
    train(make_line(open_store(store), "named"))
    reason = ["why"] if command == ["quarantine"] else []
    assert run_app(app, [*command, run, "", *reason]) == 1
    assert "error: expected a commit\nhint: name the commit by its number" in capsys.readouterr().err
    assert run_app(app, ["verify", run]) == 0


@pytest.mark.parametrize("name", ["file", "file/inside", "x" * 300, "a/" + "x" * 300])
def test_a_path_that_cannot_be_written_is_told_in_one_line(
    store: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = f"{store}/written", tmp_path / name
    (tmp_path / "file").write_text("")
    line = make_line(open_store(store), "written")
    train(line, shown=to_shown("best", "text", 10, 1).to_line())
    for command in (
        ["show", run, "--save", str(path)],
        ["pack", run, str(path)],
        ["doctor", "--store", f"{path}/runs"],
    ):
        assert run_app(app, command) in (1, 3)
        captured = capsys.readouterr()
        assert "can't" in captured.out + captured.err or "exists" in captured.err


@pytest.mark.parametrize(("which", "number"), [([], 5), (["2"], 2), (["epoch-0003"], 3)])
def test_a_packed_checkpoint_is_unpacked_as_a_run(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], which: list[str], number: int
) -> None:
    out, other = str(tmp_path / "packed.tar"), str(tmp_path / "other")
    commit = journal_of(run).read_commit(number)
    about = f"step {commit.step}, {commit.checkpoint_sha256}"
    assert run_app(app, ["pack", run, *which, out]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        f"{hashlib.sha256(Path(out).read_bytes()).hexdigest()}  {out}", f"commit {number} of run long: {about}",
    ]  # fmt: skip
    assert run_app(app, ["unpack", out, other]) == 0
    assert capsys.readouterr().out == f"run long is in {other}: commit {number}, {about}\n"
    assert load(journal_of(f"{other}/long").store, commit) is None
    assert run_app(app, ["verify", f"{other}/long"]) == 0
    assert "1 checkpoint and " in capsys.readouterr().out
    assert run_app(app, ["unpack", out, other]) == 1
    assert "already has a folder long" in capsys.readouterr().err


def test_pack_refuses_an_existing_file_before_reading(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "packed.tar"
    out.write_bytes(b"mine")
    monkeypatch.setattr("holdfast.extensions.pack.command.pack", None)
    assert run_app(app, ["pack", run, str(out)]) == 1
    assert capsys.readouterr().err == (
        f"error: {out} exists\nhint: choose a different name, or remove the existing file\n"
    )
    assert out.read_bytes() == b"mine"


def test_a_damaged_checkpoint_is_neither_packed_nor_unpacked(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "packed.tar"
    assert run_app(app, ["pack", run, "4", str(out)]) == 0
    data = bytearray(out.read_bytes())
    data[data.index(b'{"__metadata__')] ^= 1
    (tmp_path / "damaged.tar").write_bytes(data)
    damage(run, "epoch-0005/checkpoint.safetensors")
    out.unlink()
    capsys.readouterr()
    for arguments in (["pack", run, str(out)], ["unpack", str(tmp_path / "damaged.tar"), str(tmp_path / "other")]):
        assert run_app(app, arguments) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 2)
        assert "checkpoint.safetensors has the SHA-256 " in shown.err
    assert not out.exists()
    assert not (tmp_path / "other" / "long").exists()


# ---- keys


def test_keys_are_made_and_commits_verified_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mine", "another"):
        assert run_app(app, ["keygen", str(tmp_path / name)]) == 0
    out = capsys.readouterr().out
    assert out.count("key id   ") == 2
    assert f"public   {tmp_path}/mine.pub  for resume.trusted_keys, and holdfast verify --key" in out
    assert run_app(app, ["keygen", str(tmp_path / "mine")]) == 1
    assert "exists, and keygen never overwrites a key" in capsys.readouterr().err

    train(make_line(open_store(str(tmp_path)), "signed", signing_key=load_signing_key(str(tmp_path / "mine"))))
    run = f"{tmp_path}/signed"
    mine, another = (["--key", f"{tmp_path}/{name}.pub"] for name in ("mine", "another"))
    assert run_app(app, ["verify", run, *mine]) == 0
    assert run_app(app, ["verify", run, *another, *mine]) == 0
    assert run_app(app, ["verify", *another, run]) == 2
    assert "problem: the signature of commits/00000001.json was not made with a trusted key" in capsys.readouterr().out
    Path(run, "signatures/00000001-00000001.json").unlink()
    assert run_app(app, ["verify", run, *mine]) == 2
    assert "problem: commit 1 of run 'signed' is not signed" in capsys.readouterr().out


# ---- wrong use


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["shwo"], "show"),
        (["verify"], "RUN requires an argument"),
        (["pin", "{run}"], "COMMIT requires an argument"),
        (["pin", "{run}", "9"], "run 'long' has no commit 9"),
        (["pin", "{run}", "\u00b2"], "run 'long' has no commit \u00b2"),
        (["pin", "{run}", "epoch-0009", "--off"], "run 'long' has no commit epoch-0009"),
        (["pin", "{store}/none", "1"], "there is no run 'none' in"),
        (["prune", "{store}/none"], "there is no run 'none' in"),
        (["pack", "{run}"], "expected a commit and OUT.tar after the run: RUN [COMMIT] OUT.tar"),
        (["pack", "{run}", "1", "2", "3"], "expected a commit and OUT.tar after the run: RUN [COMMIT] OUT.tar"),
        (["pack"], "RUN requires an argument"),
        (["pack", "{store}/begun", "{store}/out.tar"], "run 'begun' has no commit yet that counts"),
        (["pack", "{store}/none", "{store}/out.tar"], "there is no run 'none' in"),
        (["unpack", "{store}/none.tar", "{store}"], "none.tar can't be read: No such file or directory"),
        (["unpack", "{store}", "{store}"], "can't be read: Is a directory"),
        (["unpack", "{store}/none.tar"], "STORE requires an argument"),
        (["keygen", "{store}/no/such/folder"], "can't be written: No such file or directory"),
        (["verify", "{run}", "--key", "{store}/none.pub"], "can't be read: No such file or directory"),
        (["verify", "{run}", "--key"], "--key requires an argument"),
        (["verify", "{run}", "--deeper"], "--deeper"),
        (["show", "nowhere/run"], "there is no run 'run' in"),
        (["show", "/"], "doesn't name a run"),
        (["show", "--store", "http://host"], "http:// isn't known to create a file only if its name is free"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_1(
    arguments: list[str], error: str, run: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, [argument.format(run=run, store=store) for argument in arguments]) == 1
    shown = capsys.readouterr()
    err = shown.err
    assert err.startswith("error: ")
    assert [row.split(":")[0] for row in err.splitlines()] in (["error"], ["error", "hint"])
    assert error in err
    assert shown.out == ""
    assert "Traceback" not in err


def test_a_terminal_that_lacks_a_character_gets_an_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    store = f"{tmp_path}/gr\u00f6\u00dfe"
    Path(store).mkdir()
    assert run_app(app, ["show", "--store", store]) == 0
    assert shown.getvalue() == f"no runs in {store}\n".encode("ascii", "backslashreplace")


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "RUN is <store>/<run>" in out
    assert "2 damage found" in out


def test_help_of_pack_shows_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["pack", "--help"]) == 0
    usage, _, _ = capsys.readouterr().out.partition("\n\n")
    assert " ".join(usage.split()) == "Usage: holdfast pack RUN [COMMIT] OUT.tar"


def test_goodput_shows_where_the_time_went_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = make_line(open_store(str(tmp_path)), "run")
    run = f"{tmp_path}/run"
    began = datetime.fromisoformat(line.journal.read_attempt(1).created_at).timestamp()
    took = {"train_s": 50.0, "stall_s": 2.0, "save_s": 4.0, "restart_s": 20.0}
    saved = save_next(line, trained_at=format_time(began + 70)).model_copy(update=took)
    line.commit(saved, "chunk")
    line.journal.end_attempt(1, Ending("completed", step=head_step(line)))
    found = ask_json("goodput", run, capsys=capsys)
    assert found["buckets"]["productive"] == pytest.approx(50, abs=0.1)
    assert found["buckets"]["restart"] == pytest.approx(20, abs=0.1)
    assert sum(found["buckets"].values()) == pytest.approx(found["wall_s"])
    assert (found["attempts"][0]["reason"], found["missing"]) == ("completed", [])
    assert run_app(app, ["goodput", run]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^goodput +69\.\d\d% of 72\.\d s on a machine$", shown, re.M)
    assert re.search(r"^productive +50\.0 s +69\.\d\d%$", shown, re.M)
    assert re.search(r"^attempt +ended +productive +stall +restart( +save)?$", shown, re.M), shown
    line.journal.store.replace("endings/00000001.json", b"{")
    assert run_app(app, ["goodput", run]) == 2
    assert "missing: endings/00000001.json can't be read" in capsys.readouterr().err
    line.journal.store.delete("attempts/00000001.json")
    assert run_app(app, ["goodput", run]) == 2
    line.journal.store.delete_folder("commits")
    assert run_app(app, ["goodput", run]) == 2
    told = capsys.readouterr().err
    assert "error: run 'run' has no record of an attempt\n" in told
    assert "commits/00000001.json is lost" in told
    assert run_app(app, ["goodput", f"{tmp_path}/none"]) == 1
    assert "there is no run 'none'" in capsys.readouterr().err


def test_a_run_without_a_store_is_in_the_default_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_line(open_store(str(tmp_path / "runs")), "a"))
    monkeypatch.chdir(tmp_path)
    assert [run["run"] for run in ask_json("runs", capsys=capsys)] == ["a"]
    assert ask_json("show", "a", capsys=capsys)["step"] == 10
    assert run_app(app, ["verify", "a"]) == 0
    capsys.readouterr()
    assert run_app(app, ["show", "b"]) == 1
    assert "there is no run 'b' in" in capsys.readouterr().err
    for name in (".", "..", ""):
        assert run_app(app, ["show", name]) == 1
        assert f"{name!r} doesn't name a run" in capsys.readouterr().err
    assert run_app(app, ["pack", "s3://bucket", "a.tar"]) == 1
    assert "'s3://bucket' doesn't name a run" in capsys.readouterr().err


def test_show_names_the_attempt_that_has_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = make_line(open_store(str(tmp_path)), "a", epochs=2)
    run = f"{tmp_path}/a"
    begun = ask_json("show", run, capsys=capsys)["live"]
    assert (begun["attempt"], begun["host"], begun["last_sign"]) == (1, "host", begun["since"])
    commit = train(line)
    assert ask_json("show", run, capsys=capsys)["live"]["last_sign"] == commit.created_at
    assert run_app(app, ["show", run]) == 0
    (row,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("being trained"))
    assert re.search(
        r"by attempt 1 on host since \S+, last sign \d+ s ago; or the attempt died without recording its end$", row
    )
    line.journal.end_attempt(1, Ending("preempted", step=head_step(line)))
    assert ask_json("show", run, capsys=capsys)["live"] is None


def test_a_complete_run_is_not_being_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This holds even if its last attempt was killed before it recorded its ending."""
    train(make_line(open_store(str(tmp_path)), "a", epochs=1))
    shown = ask_json("show", f"{tmp_path}/a", capsys=capsys)
    assert (shown["complete"], shown["live"]) == (True, None)


@pytest.mark.parametrize(
    ("ago", "said"),
    [(30, "30 s ago"), (-90, "0 s ago"), (300, "5 min ago"), (10_000, "3 h ago"), (10**6, "12 days ago")],
)
def test_an_age_has_a_readable_unit(ago: float, said: str) -> None:
    assert _format_age((datetime.now(UTC) - timedelta(seconds=ago)).isoformat()) == said


def test_the_earlier_names_of_commands_still_work(run: str, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    for now, earlier in (
        (["show", "--store", store], ["runs", store]),
        (["pin", run, "1", "--off"], ["unpin", run, "1"]),
        (["doctor", "--store", "memory://runs"], ["check", "memory://runs"]),
    ):
        assert run_app(app, now) == 0
        expected = capsys.readouterr().out.splitlines()
        assert run_app(app, earlier) == 0
        out, err = capsys.readouterr()
        assert [line.split()[:2] for line in out.splitlines()] == [line.split()[:2] for line in expected]
        assert err.startswith(f"holdfast {earlier[0]} is now holdfast {now[0]} ")
