"""The commits that audits of a share of the training time choose, from the records of a run."""

from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.config import Retention
from holdfast.journal import AuditRecord, now
from holdfast.journal.audits import record_audit
from holdfast.keeping.retention import prune_by_policy
from holdfast.machine.host import VARIABLE
from holdfast.proof.share import ShareChoice, choose_by_share
from holdfast.store.local import LocalStore
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH, make_line, resume, save_next


@pytest.fixture(autouse=True)
def auditor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit on a different host than the one that has trained."""
    monkeypatch.setenv(VARIABLE, "auditor")


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Return a line of four commits, of ten seconds each."""
    line = make_line(LocalStore(str(tmp_path)))
    train(line, 4)
    return line


def train(line: Line, number: int) -> None:
    for _ in range(number):
        line.commit(save_next(line).model_copy(update={"train_s": 10.0}), "chunk")


def audit(line: Line, number: int, host: str = "auditor", from_commit: int | None = None) -> None:
    commit = line.journal.read_commit(number)
    record = AuditRecord(
        commit=number, number=1, from_commit=commit.parent if from_commit is None else from_commit, notes=[], host=host,
        environment={}, checkpoint_sha256=commit.checkpoint_sha256, created_at=now(), seed=1, share=0.25,
    )  # fmt: skip
    record_audit(line.journal, record)


def choose(line: Line, share: float, seed: int = 1) -> list[int]:
    return [each.number for each in choose_by_share(line.journal, share, seed).commits]


def test_a_share_pays_for_the_newest_commit_and_then_for_others(line: Line) -> None:
    assert choose(line, 0.2) == [], "8 s are less than a chunk"
    assert choose(line, 0.25) == [4]
    assert {tuple(choose(line, 0.5, seed)) for seed in range(40)} == {(4, 1), (4, 2), (4, 3)}
    assert choose(line, 0.75, 3) == choose(line, 0.75, 3)
    assert sorted(choose(line, 1.0)) == [1, 2, 3, 4]


def test_audits_on_record_are_taken_off_and_the_rest_counts_later(line: Line) -> None:
    audit(line, 4)
    assert choose(line, 0.25) == []
    train(line, 3)
    assert choose(line, 0.25) == [], "17.5 s, of which 10 s are spent"
    train(line, 1)
    assert choose(line, 0.25) == [8], "20 s, and the rests of both nights count"


def test_an_audit_by_hand_counts_with_all_that_it_has_trained(line: Line) -> None:
    audit(line, 4, from_commit=0)
    assert choose(line, 0.9) == []
    train(line, 16)
    assert len(choose(line, 0.25)) == 1, "50 s, of which 40 s are spent"


def test_a_certified_commit_is_not_audited_again_and_no_commit_twice_on_a_host(line: Line) -> None:
    audit(line, 4, host="another")  # it certifies commit 4
    audit(line, 3, host="host")  # the host that has trained it
    assert choose(line, 0.75) == [3]
    audit(line, 3)
    assert set(choose(line, 1.0)) <= {1, 2}


def test_the_only_host_audits_each_of_its_commits_once(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its audits certify nothing, and still find a bit that flipped once."""
    monkeypatch.setenv(VARIABLE, "host")
    assert choose(line, 0.25) == [4]
    audit(line, 4, host="host")
    assert choose(line, 0.5) == [3]


def test_what_another_host_has_trained_comes_before_what_this_one_has(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.journal.claim_attempt(2, "continued", "auditor", 1, {})
    mine = Line(line.journal, 2, SETTINGS, STEPS_PER_EPOCH)
    resume(mine)
    train(mine, 2)
    assert choose(line, 2 / 6) == [4], "the first of the new attempt crosses a resume, and takes 20 s"
    first, *others = choose(line, 1.0)
    assert (first, set(others[:3])) == (4, {1, 2, 3})
    assert others[3:] == [6], "then the newest of its own; 10 s are left, and an audit may take 20 s"


def test_a_resumed_chunk_takes_two(line: Line) -> None:
    line.journal.claim_attempt(2, "continued", "host", 1, {})
    other = Line(line.journal, 2, SETTINGS, STEPS_PER_EPOCH)
    resume(other)
    train(other, 1)
    assert choose(line, 0.3) == [], "15 s"
    assert choose(line, 0.4) == [5]
    audit(line, 5, from_commit=3)
    assert choose(line, 0.7) == [], "15 s are left, and an audit may take 20 s"


def test_only_what_can_be_trained_again_is_chosen(line: Line) -> None:
    prune_by_policy(line.journal, Retention(keep_last=2), STEPS_PER_EPOCH)
    assert choose(line, 1.0) == [4], "the checkpoint before commit 3 is gone"


def test_a_run_without_times_has_no_share(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    line.commit(save_next(line), "chunk")
    assert choose(line, 1.0) == []


def test_the_choice_says_what_it_has_counted(line: Line) -> None:
    audit(line, 4)
    choice = choose_by_share(line.journal, 0.5, 7)
    assert (choice.trained_s, choice.spent_s, choice.longest_s) == (40.0, 10.0, 10.0)
    assert isinstance(choice, ShareChoice)
    number = choice.commits[0].number
    known = "share     0.5 of 40 s of training is 20 s; earlier audits took 10 s, and one more takes up to 10 s: "
    assert str(choice) == f"{known}audits commit {number}, seed 7"
    assert str(choose_by_share(line.journal, 0.25, 7)).endswith("audits no commit now")
