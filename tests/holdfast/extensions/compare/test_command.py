"""``holdfast compare`` from the command line: runs, commits and stores, its exit codes, and records that are lost."""

import json
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint import METRICS
from holdfast.cli import app, run_app
from holdfast.config import Retention
from holdfast.journal import AuditRecord, Journal, now, record_name
from holdfast.journal.audits import record_audit
from holdfast.keeping.retention import prune_by_policy
from holdfast.store import open_store
from tests.support.makers import STEPS_PER_EPOCH, make_line, root, save_next, train

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, whose ``runs`` has the run ``a`` with three commits, and a copy of it: ``b``."""
    monkeypatch.chdir(tmp_path)
    line = make_line(open_store("runs"), "a")
    for _ in range(3):
        train(line)
    shutil.copytree("runs/a", "runs/b")
    return tmp_path


def commit_other(store: str, run: str) -> None:
    """Commit a checkpoint with different bytes after the run's newest one."""
    line = make_line(open_store(store), run)
    line.commit(save_next(line, size_bytes=128), "chunk")


def ask(capsys: Capture, *arguments: str, exit_code: int = 0) -> str:
    capsys.readouterr()
    assert run_app(app, ["compare", *arguments]) == exit_code
    return capsys.readouterr().out


def test_a_copy_is_equal(folder: Path, capsys: Capture) -> None:
    first, *others = ask(capsys, "a", "runs/b").splitlines()
    assert first.startswith("equal: a and b have one content id at step 30: ")
    assert others == []


def test_the_first_commit_that_differs_is_named(folder: Path, capsys: Capture) -> None:
    train(make_line(open_store("runs"), "a"))
    commit_other("runs", "b")
    text = ask(capsys, "a", "b", exit_code=2)
    assert text.startswith("different: a and b, equal until step 30\n  first different content id at step 40: commit 4")
    assert "no difference on record explains" in text
    found = json.loads(ask(capsys, "a", "b", "--json", exit_code=2))
    assert (found["is_equal"], found["different_at"], found["equal_until"]) == (False, 40, 30)
    assert (found["one"]["first"], found["other"]["first"]) == (4, 4)


def test_audits_tell_which_of_two_commits_is_certified(folder: Path, capsys: Capture) -> None:
    line = make_line(open_store("runs"), "a")
    commit = train(line)
    commit_other("runs", "b")
    assert "by audits" not in ask(capsys, "a", "b", exit_code=2)
    record = AuditRecord(
        commit=commit.number, number=1, from_commit=commit.parent, checkpoint_sha256=commit.checkpoint_sha256, notes=[],
        host="node-2", environment={}, created_at=now(),
    )  # fmt: skip
    record_audit(line.journal, record)
    text = ask(capsys, "a", "b", exit_code=2)
    assert "\n  by audits, commit 4 of a is certified by node-2, commit 4 of b is a candidate\n" in text
    found = json.loads(ask(capsys, "a", "b", "--json", exit_code=2))
    assert (found["one"]["certified_by"], found["other"]["certified_by"]) == ("node-2", "")


def test_a_pruned_checkpoint_is_not_called_damaged(folder: Path, capsys: Capture) -> None:
    train(make_line(open_store("runs"), "a"))
    commit_other("runs", "b")
    train(make_line(open_store("runs"), "b"))
    prune_by_policy(Journal(open_store("runs"), "b"), Retention(keep_last=1), STEPS_PER_EPOCH)
    text = ask(capsys, "a", "b", exit_code=2)
    assert "the tensors at step 40 weren't compared: the checkpoint of b was pruned" in text
    assert "damaged" not in text


def test_a_commit_is_compared_as_the_training_that_led_to_it(folder: Path, capsys: Capture) -> None:
    text = ask(capsys, "a@2", "b")
    assert text.startswith("equal: a and b have one content id at step 20: ")
    assert "b continues to step 30, a ends at step 20" in text
    line = make_line(open_store("runs"), "a")
    line.journal.quarantine(3, "damaged", line.journal.attempts())
    commit_other("runs", "a")  # commit 4, from commit 2
    text = ask(capsys, "a@3", "a@4", exit_code=2)
    assert text.startswith(
        "different: a@3 and a@4, equal until step 20\n  first different content id at step 30: commit 3"
    )
    assert ask(capsys, "a@2", "b@epoch-0002").startswith("equal: a and b have one content id at step 20: ")


def test_a_run_is_compared_with_the_run_of_its_name_in_a_store(folder: Path, capsys: Capture) -> None:
    shutil.copytree("runs", "backup")
    assert ask(capsys, "runs/a", "backup").startswith("equal: runs/a and backup have one content id at step 30")
    commit_other("backup", "a")
    assert "backup continues to step 40, runs/a ends at step 30" in ask(capsys, "runs/a", "backup")


def test_two_stores_are_compared_run_by_run(folder: Path, capsys: Capture) -> None:
    shutil.copytree("runs", "backup")
    assert ask(capsys, "runs", "backup").endswith("2 runs compared, 0 different\n")
    train(make_line(open_store("runs"), "a"))
    commit_other("backup", "a")
    shutil.rmtree("backup/b")
    text = ask(capsys, "runs", "backup", exit_code=2)
    assert text.startswith("a: different: ")
    assert f"\nb: only in {folder}/runs\n" in text
    assert text.endswith("2 runs compared, 2 different\n")
    assert json.loads(ask(capsys, "runs", "backup", "--json", exit_code=2))["b"] == f"only in {folder}/runs"


def test_lost_records_are_named_and_the_rest_is_compared(folder: Path, capsys: Capture) -> None:
    train(make_line(open_store("runs"), "a"))
    commit_other("runs", "b")
    Path("runs/b", record_name("commits", 2)).write_text("damaged")
    assert ask(capsys, "a@3", "b@3").splitlines()[1:] == ["  note: the record of commit 2 of b is lost"]
    Path("runs/b/epoch-0004", METRICS).unlink()
    Path("runs/b/epoch-0004/checkpoint.safetensors").write_bytes(b"")
    Path("runs/b/metrics/00000004.jsonl").write_text("{}\n")
    notes = [line for line in ask(capsys, "a", "b", exit_code=2).splitlines() if line.startswith("  note: ")]
    assert notes[0] == "  note: the record of commit 2 of b is lost"
    assert notes[1] == "  note: the trail of commit 4 of b is lost"
    assert notes[2].startswith("  note: the tensors at step 40 weren't compared: ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["runs/a"], "other"),
        (["runs/a", "runs/none"], "'runs/none' is neither a run nor a store"),
        (["runs/a@7", "runs/b"], "run 'a' has no commit 7"),
        (["runs/a@", "runs/b"], "'runs/a@' is not a commit of a run"),
        (["runs@3", "runs/b"], "'runs@3' is not a commit of a run"),
        (["runs/a", "runs/begun"], "run 'begun' has no commit yet that counts"),
        (["runs/a", "runs/apart"], "a and apart can't be compared: they have no checkpoints at the same step"),
    ],
)
def test_wrong_use_is_one_line(folder: Path, capsys: Capture, arguments: list[str], error: str) -> None:
    make_line(open_store("runs"), "begun")
    train(make_line(open_store("runs"), "apart"), steps=7)
    shutil.rmtree("runs/apart/metrics")
    Path("runs/apart/epoch-0001-step-00000007", METRICS).unlink()
    capsys.readouterr()
    assert run_app(app, ["compare", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert error.lower() in shown.err.lower().splitlines()[0]


def test_hostile_names_reach_the_terminal_as_escapes(folder: Path, capsys: Capture) -> None:
    line = make_line(open_store("runs"), "a")
    shutil.copytree(root(line), "runs/evil\x1b[2J")
    commit_other("runs", "evil\x1b[2J")
    assert "evil\\x1b[2J" in ask(capsys, "a", "runs/evil\x1b[2J")


def test_diff_says_which_command_compares_two_runs(folder: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert run_app(app, ["diff", "runs/a", "runs/b"]) == 1
    assert "hint: to compare two runs: holdfast compare runs/a runs/b" in capsys.readouterr().err
