"""Tests of gathering: what is on record, what is damaged, and that nothing is read twice."""

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import RunUnknown, WrongUse
from holdfast.extensions.report.commits import describe_commits
from holdfast.extensions.report.curves import make_curves
from holdfast.extensions.report.gathering import Gatherer, History, find_line
from holdfast.extensions.report.lives import find_starts, list_lives, make_report_ledger
from holdfast.extensions.report.sections import make_changes
from holdfast.journal import Journal, RunRecord, record_name
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from tests.support.long_run import LongRun
from tests.support.makers import make_commit, make_line, train


def test_the_line_leaves_out_what_was_taken_back(history: History) -> None:
    assert history.problems == []
    assert sorted(history.commits.keys() - history.line) == [10, 11, 12]
    assert history.newest is not None
    assert history.newest.number == 20
    (loss,) = make_curves([history])["curves"]["train/loss"]
    assert loss["x"] == [*range(1, 171)]
    assert loss["rolled_count"] == 1
    assert loss["rolled"][0][0] == [*range(91, 121)]


def test_the_line_goes_from_parent_to_parent_and_over_a_lost_record() -> None:
    made = [make_commit(1), make_commit(2), make_commit(3, step=22), make_commit(4, step=30, parent=2)]
    commits = {commit.number: commit for commit in made}
    assert find_line(commits, 4) == {1, 2, 4}
    del commits[2]
    assert find_line(commits, 4) == {1, 4}


def test_attempts_have_their_reasons_and_the_time_between(history: History) -> None:
    ledger, _ = make_report_ledger(history, 0.0)
    lives = list_lives(history, ledger)
    assert [life.reason for life in lives] == ["crashed", "unhealthy", "preempted", "completed"]
    assert [life.gap_s for life in lives] == [0.0, 9.0, 9.0, 9.0]
    assert [life.first_step for life in lives] == [0, 50, 100, 120]


def test_an_adopted_commit_belongs_to_the_attempt_that_trained_it(tmp_path: Path) -> None:
    history = Gatherer(LongRun(tmp_path, attempts=2).journal).gather()
    last = history.commits[10]  # of attempt 1; commit 11 is the first of attempt 2
    adopted = history.commits[11].model_copy(update={"why": "adopted", "trained_at": last.created_at})
    continues = {"commit": 10, "checkpoint_sha256": last.checkpoint_sha256}
    claim = history.attempts[2].model_copy(update={"lineage": {"continues": continues}})
    history = replace(history, commits=history.commits | {11: adopted}, attempts=history.attempts | {2: claim})
    lives = list_lives(history, make_report_ledger(history, 0.0)[0])
    assert [(life.first_step, life.last_step, life.commits) for life in lives] == [(0, 110, 11), (110, 200, 9)]
    assert find_starts(history) == {2: 11}
    assert "commit 11, content id" in (changes := make_changes(history))
    assert "the newest was commit 10 when it began" in changes


def test_a_commit_is_verified_by_the_attempt_that_continued_from_it(history: History) -> None:
    names = [row[0] for row in describe_commits(history)["rows"] if row[-1]]
    assert find_starts(history) == {2: 5, 3: 10, 4: 15}
    assert names == [15, 10, 5]


def test_a_damaged_record_hides_only_itself(rolled: LongRun) -> None:
    for name in ("commits/00000005.json", "attempts/00000002.json", "metrics/00000007.jsonl", "run.json"):
        path = rolled.folder / name
        path.write_bytes(b"?" + path.read_bytes()[1:])
    (rolled.folder / "commits/00000006.json").unlink()
    (rolled.folder / "metrics/00000008.jsonl").unlink()
    history = Gatherer(rolled.journal).gather()
    said = "\n".join(history.problems)
    numbers = {"commits": (5, 6), "attempts": (2,), "metrics": (7, 8)}
    named = [f"{folder}/{number:08d}" for folder, each in numbers.items() for number in each]
    for name in [*named, "run.json"]:
        assert name in said, name
    assert len(history.commits) == 18
    (loss,) = make_curves([history])["curves"]["train/loss"]
    assert {1, 62, 170} <= set(loss["x"])  # of 00000007 only the first line is damaged
    assert 61 not in loss["x"]


def test_a_run_without_run_json_is_shown_and_none_is_unknown(rolled: LongRun, tmp_path: Path) -> None:
    (rolled.folder / "run.json").unlink()
    assert "run.json is missing" in Gatherer(rolled.journal).gather().problems
    with pytest.raises(RunUnknown):
        Gatherer(Journal(open_store(str(tmp_path)), "nowhere")).gather()


def test_a_run_of_a_later_format_is_refused(rolled: LongRun) -> None:
    record = RunRecord(format=99, run="rolled", recipe="m:f", first_commit=1, created_at="2026-01-01T00:00:00+00:00")
    (rolled.folder / "run.json").write_bytes(record.to_bytes())
    with pytest.raises(WrongUse, match="format 99"):
        Gatherer(rolled.journal).gather()


def test_a_second_look_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line(open_store(str(tmp_path)))
    for _ in range(3):
        train(line)
    gatherer = Gatherer(Journal(open_store(str(tmp_path)), "run"))
    gatherer.gather()
    train(line)
    read: list[str] = []
    monkeypatch.setattr(LocalStore, "read", _noting(LocalStore.read, read))
    history = gatherer.gather()
    assert len(history.commits) == 4
    assert [name for name in read if name.startswith("commits/")] == [record_name("commits", 4)]


def _noting(method, read):  # type: ignore[no-untyped-def]
    def noted(store, name, *arguments):  # type: ignore[no-untyped-def]
        read.append(name)
        return method(store, name, *arguments)

    return noted
