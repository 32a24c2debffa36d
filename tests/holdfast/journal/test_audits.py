"""Audits on record, the commits that they certify, and what retention keeps for them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.cli import app, run_app
from holdfast.config import Retention
from holdfast.journal import AuditRecord, Commit, Journal, audit_name, now, record_name
from holdfast.journal.audits import list_audits, list_refused, read_audits, record_audit
from holdfast.journal.chains import find_certified, list_certified, read_newest_verdict
from holdfast.journal.judgement import list_waiting, read_verdict
from holdfast.journal.verdict import Ask
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH, make_line, resume, save_next, train


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return make_line(LocalStore(str(tmp_path)))


def audit(line: Line, commit: Commit, host: str = "another", found: str | None = None) -> AuditRecord:
    record = AuditRecord(
        commit=commit.number, number=1, from_commit=commit.parent, notes=[], host=host, environment={},
        checkpoint_sha256=commit.checkpoint_sha256 if found is None else found, created_at=now(),
    )  # fmt: skip
    return record_audit(line.journal, record)


def certified(line: Line) -> int:
    found = find_certified(line.journal, line.journal.candidates())
    return found[0].number if found else 0


def test_another_host_certifies_a_commit_with_the_same_bytes(line: Line) -> None:
    commits = [train(line) for _ in range(3)]
    assert certified(line) == 0
    audit(line, commits[1], host="host")  # the host that trained it
    audit(line, commits[1], found="0" * 64)  # different bytes
    audit(line, commits[1], found="")  # the gate refused the start
    assert certified(line) == 0
    assert audit(line, commits[1]).number == 4
    assert certified(line) == 2
    audit(line, commits[0])
    assert certified(line) == 2, "the newest counts, not the last audit"
    assert list_audits(line.journal) == {1: [1], 2: [1, 2, 3, 4]}
    assert verify_run(line.journal).problems == []


def test_the_host_whose_ranks_left_an_adopted_checkpoint_does_not_certify_it(tmp_path: Path) -> None:
    first = make_line(LocalStore(str(tmp_path)))
    train(first)
    save_next(first)
    first.journal.claim_attempt(2, "continued", "between", 1, {})  # it dies before it adopts anything
    first.journal.claim_attempt(3, "continued", "adopting", 1, {})
    line = Line(first.journal, 3, SETTINGS, STEPS_PER_EPOCH)
    resume(line)
    adopted = line.head
    assert adopted
    assert adopted.why == "adopted"
    for host, number in (("host", 0), ("between", 0), ("adopting", 0), ("third", adopted.number)):
        audit(line, adopted, host)
        assert certified(line) == number, host


@pytest.mark.parametrize("why", ["held", "released"])
def test_an_attempt_that_trained_nothing_has_no_commit_to_certify(line: Line, why: str) -> None:
    """With no machine on record, even an audit on the host that trained the commit would certify it."""
    commit = train(line)
    line.journal.claim_attempt(2, why, "host", 1, {})
    for hosts in ([], ["host"]):
        forged = commit.model_copy(update={"attempt": 2, "hosts": hosts})
        line.journal.store.replace(record_name("commits", 1), forged.to_bytes())
        journal = Journal(LocalStore(line.journal.store_url), "run")
        audit(line, commit, "host")
        assert find_certified(journal, [forged]) is None
        assert read_verdict(journal, forged) is None
        assert run_app(app, ["show", line.journal.store.url]) == 0


def test_show_lists_the_audits_once(
    line: Line, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = [train(line) for _ in range(3)]
    audit(line, commits[0])
    audit(line, commits[1], host="host")
    listed: list[str] = []
    original = LocalStore.list

    def note(store: LocalStore, folder: str = "", **options: Any) -> list[str]:
        listed.append(folder)
        return original(store, folder, **options)

    monkeypatch.setattr(LocalStore, "list", note)
    for options in ([], ["--json"]):
        listed.clear()
        assert run_app(app, ["show", line.journal.store.url, *options]) == 0
        assert sum(folder.endswith("audits") for folder in listed) == 1, listed
        said = capsys.readouterr().out
    shown = json.loads(said)
    assert (shown["certified"]["commit"], shown["judged"]["commit"]) == (1, 2)


def test_retention_keeps_the_newest_certified_checkpoint(line: Line) -> None:
    policy = Retention(keep_last=1)
    commits = [train(line) for _ in range(4)]
    audit(line, commits[1])
    report = prune_by_policy(line.journal, policy, STEPS_PER_EPOCH)
    assert report
    assert {entry.commit: entry.why for entry in report.protected} == {2: "the newest certified commit"}
    audit(line, commits[3])
    report = prune_by_policy(line.journal, policy, STEPS_PER_EPOCH)
    assert report
    assert [entry.commit for entry in report.pruned] == [2]


def read_report_notes(journal: Journal) -> dict[int, str]:
    """Return the note of each commit in the report's table."""
    gathering = pytest.importorskip("holdfast.extensions.report.gathering")
    commits = pytest.importorskip("holdfast.extensions.report.commits")
    return {row[0]: row[16] for row in commits.describe_commits(gathering.Gatherer(journal).gather())["rows"]}


def test_every_commit_is_certified_or_a_candidate(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    commits = [train(line) for _ in range(4)]
    audit(line, commits[0], host="host")
    for number, host in ((1, "b"), (1, "c"), (2, "c")):
        audit(line, commits[number], host)
    by_number = {each.number: each for each in commits}
    assert list_certified(line.journal, by_number) == {2: "b", 3: "c"}
    assert read_report_notes(line.journal) == {1: "", 2: "certified by b", 3: "certified by c", 4: ""}
    for number, said in ((3, "bytes; later commits are candidates\n"), (4, "bytes\n")):
        audit(line, commits[number - 1], "d")
        assert run_app(app, ["show", line.journal.store.url]) == 0
        shown = capsys.readouterr().out
        assert f"commit {number} (step {10 * number})" in shown
        assert f"has trained it again to the same {said}" in shown


def test_a_damaged_audit_is_named_and_certifies_nothing(line: Line) -> None:
    commit = train(line)
    name = audit_name(commit.number, audit(line, commit).number)
    (Path(line.journal.store.url) / name).write_text("{}")
    assert certified(line) == 0
    assert [problem for problem in verify_run(line.journal).problems if problem.startswith(name)]


def test_a_commit_of_several_nodes_is_neither_certified_nor_blamed_on_one_of_them(tmp_path: Path) -> None:
    """The record of an attempt names node 0 alone; the audit may run on another node of it."""
    first = make_line(LocalStore(str(tmp_path)))
    train(first)
    first.journal.claim_attempt(2, "continued", "node-0", 1, {}, {"nodes": "2"})
    line = Line(first.journal, 2, SETTINGS, STEPS_PER_EPOCH)
    resume(line)
    commit = train(line)
    audit(line, commit, "node-1")
    assert certified(line) == 0
    found = read_verdict(line.journal, commit)
    assert found
    assert (found.kind, found.reason) == (
        "undecided", "no record names all machines that trained it: another node and node-0"
    )  # fmt: skip
    other = train(line)
    for host in ("b", "c"):
        audit(line, other, host, found="0" * 64)
    found = read_verdict(line.journal, other)
    assert found
    assert (found.kind, found.host) == ("undecided", "")
    assert "no record says which" in found.reason


def test_a_certified_commit_that_the_gate_refuses_is_left_out_of_the_next_replay(line: Line) -> None:
    """Its bytes are right. A rank that saves nothing may have held different values, which its probe shows."""
    first, parent, commit = (train(line) for _ in range(3))
    audit(line, commit, found="")
    found = read_verdict(line.journal, commit)
    assert found
    assert found.ask == Ask(parent.number)
    assert not [*list_waiting(line.journal, parent.number)]
    audit(line, parent)
    found = read_verdict(line.journal, commit)
    assert found
    assert found.ask == Ask(commit.number, first.number, ("host",))
    assert [*list_waiting(line.journal, parent.number)] == [found.ask]
    assert list_refused(line.journal) == {parent.number}


def test_a_chain_of_doubted_parents_is_judged_at_any_length(line: Line) -> None:
    """Anyone who can write to the store can forge such audits; show has to answer all the same."""
    commit = train(line)
    for number in range(2, 200):
        fields = {
            "number": number,
            "parent": number - 1,
            "step": number * STEPS_PER_EPOCH,
            "path": f"epoch-{number:04d}",
        }
        forged = commit.model_copy(update=fields)
        line.journal.store.create(record_name("commits", number), forged.to_bytes())
        record = AuditRecord(
            commit=number, number=1, from_commit=number - 1, notes=[], host="another", environment={},
            checkpoint_sha256="", created_at=now(),
        )  # fmt: skip
        line.journal.store.create(audit_name(number, 1), record.to_bytes())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        found = read_newest_verdict(line.journal)
    finally:
        sys.setrecursionlimit(limit)
    assert found is not None
    assert (found.kind, found.ask and found.ask.commit) == ("undecided", 1)


def test_an_audit_in_the_file_of_another_commit_certifies_nothing(line: Line) -> None:
    train(line)
    audit = AuditRecord(
        commit=10**15, number=1, from_commit=0, notes=[], host="b", environment={}, created_at=now(),
        checkpoint_sha256=line.journal.read_commit(1).checkpoint_sha256,
    )  # fmt: skip
    line.journal.store.create("audits/00000001-00000001.json", audit.to_bytes())
    assert [*read_audits(line.journal, 1, [1])] == []
