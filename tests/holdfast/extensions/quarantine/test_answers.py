"""The life of a verdict: it is found, every view shows it, and it is answered."""

import re
from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.cli import app, run_app
from holdfast.extensions.quarantine.consequences import keep_verdict
from holdfast.journal import AuditRecord, Journal, now
from holdfast.journal.answers import list_unanswered
from holdfast.journal.audits import record_audit
from holdfast.journal.chains import describe_chain, find_certified, list_certified
from holdfast.keeping.verification import verify_run
from holdfast.ledger.standing import read_standing
from holdfast.store.local import LocalStore
from tasks.reporting import _describe_standing
from tests.support.makers import make_line, resume, train


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Return a run of five commits, of which 1, 3 and 5 were audited; a wrong byte of commit 3 goes on in 4 and 5."""
    line = make_line(LocalStore(str(tmp_path)))
    for _ in range(5):
        train(line)
    audit(line, 1, "b")
    for host in ("b", "c"):
        audit(line, 3, host, "f" * 64)
    audit(line, 5, "b")
    return line


def audit(line: Line, number: int, host: str, found: str = "", from_commit: int | None = None) -> None:
    commit = line.journal.read_commit(number)
    record = AuditRecord(
        commit=number, number=1, from_commit=number - 1 if from_commit is None else from_commit, host=host, notes=[],
        checkpoint_sha256=found or commit.checkpoint_sha256, environment={}, created_at=now(),
    )  # fmt: skip
    record_audit(line.journal, record)


def show_report(journal: Journal) -> str:
    gathering = pytest.importorskip("holdfast.extensions.report.gathering")
    page = pytest.importorskip("holdfast.extensions.report.page")
    return str(page.make_page(gathering.Gatherer(journal).gather()))


def watch(journal: Journal) -> str:
    lines = pytest.importorskip("holdfast.extensions.watch.lines")
    reading = pytest.importorskip("holdfast.extensions.watch.reading")
    return "\n".join(lines.Lines().list_new(reading.RunReader(journal).begin(), 0.0))


def look(line: Line, capsys: pytest.CaptureFixture[str]) -> dict[str, bool]:
    """Return which views name the verdict on commit 3."""
    url = line.journal.store.url
    capsys.readouterr()
    exit_code = run_app(app, ["verify", url])
    verified = capsys.readouterr().out
    assert run_app(app, ["show", url]) == 0
    shown = capsys.readouterr().out
    assert run_app(app, ["show", url, "--json"]) == 0
    journal = Journal(LocalStore(line.journal.store_url), line.journal.run)
    views = {
        "show": shown,
        "json": capsys.readouterr().out.partition('"unanswered": [')[2].partition("]")[0],
        "verify": verified if exit_code == 2 else "",
        "report": show_report(journal),
        "watch": watch(journal),
        "prefect": "\n".join(_describe_standing(journal, read_standing(journal))),
    }
    return {name: "host ended on different bytes than b and c" in text for name, text in views.items()}


def test_every_view_shows_a_verdict_until_it_is_answered(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(look(line, capsys).values()) == {True}, "though commit 5 is certified, and newer"
    url = line.journal.store.url
    assert run_app(app, ["release", url]) == 1
    assert "--reason TEXT" in capsys.readouterr().err
    assert run_app(app, ["release", url, "--reason", "a test run"]) == 0
    assert capsys.readouterr().out.startswith("answered: commit 3: machine: host ended on different bytes")
    seen = look(line, capsys)
    assert not any(found for name, found in seen.items() if name not in ("show", "report")), seen
    assert run_app(app, ["show", url]) == 0
    for page in (capsys.readouterr().out, show_report(line.journal)):
        assert re.search(r"commit 3: answered by .*: a test run", page)
    assert verify_run(line.journal).ok
    audit(line, 3, "d", "f" * 64)
    assert [each.commit for each in list_unanswered(line.journal)] == [3], "a later audit asks again"


def test_a_verdict_is_answered_by_a_rollback_and_by_two_machines_that_refute_it(line: Line) -> None:
    (found,) = list_unanswered(line.journal)
    assert "is rolled back to commit 1 " in "".join(keep_verdict(line.journal, found, "rollback"))
    assert list_unanswered(line.journal) == []


def test_a_quarantine_of_the_guilty_commit_alone_answers_nothing(line: Line) -> None:
    """The commits after it still count, and continue its wrong bytes."""
    line.journal.quarantine(3, "it is wrong", line.attempt)
    assert [each.commit for each in list_unanswered(line.journal)] == [3]
    line.journal.quarantine(4, "it continues from 3", line.attempt)
    assert [each.commit for each in list_unanswered(line.journal)] == [3]
    line.journal.quarantine(5, "it continues from 4", line.attempt)
    assert list_unanswered(line.journal) == []
    resume(line)
    train(line)
    assert list_unanswered(line.journal) == []


def test_two_machines_refute_a_third(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    train(line)
    audit(line, 1, "b", "f" * 64)
    assert [each.kind for each in list_unanswered(line.journal)] == ["undecided"]
    audit(line, 1, "c")
    assert list_unanswered(line.journal) == []
    assert verify_run(line.journal).ok


def test_certified_is_said_of_a_chain(line: Line, tmp_path: Path) -> None:
    found = find_certified(line.journal, line.journal.candidates())
    assert found
    assert found[0].number == 1, "5 is after 3, which is in doubt"
    commits = {each.number: each for each in line.journal.candidates()}
    assert list_certified(line.journal, commits) == {1: "b"}
    other = make_line(LocalStore(str(tmp_path)), "other")
    for _ in range(4):
        train(other)
    audit(other, 3, "b")
    assert describe_chain(other.journal) == "not certified before commit 3: 1-2"
    audit(other, 4, "b", from_commit=0)
    assert describe_chain(other.journal) == "each commit up to 4 is certified"
