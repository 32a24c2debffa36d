"""Tests of the command ``report``."""

from pathlib import Path

import pytest

from holdfast.cli import app, run_app
from holdfast.journal import Journal, RunRecord
from holdfast.store import open_store
from tests.support.long_run import LongRun
from tests.support.makers import make_line, train


@pytest.fixture
def store(tmp_path: Path) -> Path:
    LongRun(tmp_path / "runs", "a", commits=4)
    LongRun(tmp_path / "runs", "b", commits=4)
    return tmp_path / "runs"


def report(*arguments: object) -> int:
    return run_app(app, ["report", *map(str, arguments)])


def test_a_run_runs_and_a_store_become_pages(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert report(store / "a", "-o", out) == 0
    assert "<h1>run a</h1>" in out.read_text("utf-8")
    assert capsys.readouterr().out.startswith(f"{out}: 1 run, 4 commits, 0.1 MB")
    assert report(store / "a", store / "b", "--out", out) == 0
    assert "<h1>2 runs</h1>" in out.read_text("utf-8")
    assert "parallel-plot" not in out.read_text("utf-8").partition("<script>")[0]  # their settings are the same
    assert report(store, "-o", out) == 0
    assert out.read_text("utf-8").count("<polyline") == 2


def test_a_name_alone_is_a_run_of_the_default_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report("a") == 0
    assert "<h1>run a</h1>" in (tmp_path / "report.html").read_text("utf-8")
    assert report("runs") == 0
    assert "<h1>2 runs</h1>" in (tmp_path / "report.html").read_text("utf-8")


def test_damage_is_shown_and_said(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "a/commits/00000002.json").write_text("{}", "utf-8")
    assert report(store / "a", "-o", tmp_path / "page.html") == 2
    assert "run a: commits/00000002.json can't be read" in capsys.readouterr().err
    assert "commits/00000002.json can&#x27;t be read" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected a run, several runs or a store"),
        (("{store}/nowhere",), "there is no run 'nowhere'"),
        (("{store}", "{store}/a"), "is a store, and a report of a store takes no further names"),
        (("{store}/later",), "run 'later' is stored in format 99"),
        (("{store}/a", "-o", "{store}"), "is a folder"),
        (("{store}/a", "-o", "{store}/no/where.html"), "for the output file doesn't exist"),
    ],
)
def test_wrong_use_is_one_line(
    store: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    later = RunRecord(format=99, run="later", recipe="m:f", first_commit=1, created_at="2026-01-01T00:00:00+00:00")
    open_store(str(store)).create("later/run.json", later.to_bytes())
    assert report(*(each.format(store=store) for each in arguments)) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")


def test_a_run_on_s3_becomes_a_page(bucket: str, tmp_path: Path) -> None:
    line = make_line(open_store(bucket), "far")
    for _ in range(3):
        train(line)
    assert report(f"{bucket}/far", "-o", tmp_path / "page.html") == 0
    assert Journal(open_store(bucket), "far").store.url in (tmp_path / "page.html").read_text("utf-8")
    assert report(bucket, "-o", tmp_path / "page.html") == 0
    assert "far" in (tmp_path / "page.html").read_text("utf-8")
