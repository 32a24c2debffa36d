"""The rollback of a run that a faulty machine has trained, and an attempt whose parent is quarantined meanwhile."""

import shutil
import time
from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.errors import ParentQuarantined
from holdfast.extensions.quarantine.consequences import go_back_now, keep_verdict
from holdfast.extensions.quarantine.holds import find_hold
from holdfast.extensions.quarantine.records import quarantine_machine, release_machine
from holdfast.extensions.quarantine.rollback import choose_to_certify, find_base, roll_back, stop_run
from holdfast.journal import AuditRecord, Journal, now, record_name
from holdfast.journal.audits import record_audit
from holdfast.journal.judgement import read_verdict
from holdfast.journal.verdict import AuditVerdict
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH, make_line, resume, train


def continue_on(line: Line, host: str) -> Line:
    """Return the line as the next attempt, on a host, continues it."""
    number = line.attempt + 1
    line.journal.claim_attempt(number, "continued", host, 1, {})
    found = Line(line.journal, number, SETTINGS, STEPS_PER_EPOCH)
    resume(found)
    return found


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Return a line with commits 1 and 2 of the machine host, 3 and 4 of a, and 5 of b."""
    line = make_line(LocalStore(str(tmp_path)))
    for host, commits in (("host", 2), ("a", 2), ("b", 1)):
        line = line if host == "host" else continue_on(line, host)
        for _ in range(commits):
            train(line)
    return line


def certify(line: Line, number: int, from_commit: int | None = None) -> None:
    sha256 = line.journal.read_commit(number).checkpoint_sha256
    record = AuditRecord(
        commit=number, number=1, from_commit=number - 1 if from_commit is None else from_commit,
        checkpoint_sha256=sha256, notes=[], host="c", environment={}, created_at=now(),
    )  # fmt: skip
    record_audit(line.journal, record)


def verdict(host: str, commit: int, *, is_own: bool, at: str = "") -> AuditVerdict:
    return AuditVerdict("machine", commit, "it differs", host=host, is_own=is_own, at=at, agreeing=2, deviating=1)


def list_candidates(line: Line) -> list[int]:
    return [each.number for each in line.journal.candidates()]


@pytest.mark.parametrize(
    ("host", "commit", "is_own", "certified", "kept"),
    [
        ("a", 3, True, [], [2, 1]),
        ("a", 4, True, [], [2, 1]),  # commit 3 is a's, too, and nobody has certified it
        ("a", 4, True, [3], [3, 2, 1]),
        ("a", 3, True, [1, 5], [2, 1]),  # commit 5 continues exactly, but from a wrong state
        ("a", 2, False, [], [2, 1]),  # a has audited another machine's commit wrongly
        ("a", 2, False, [4], [2, 1]),  # commit 4 may continue wrong bytes of 3
        ("a", 2, False, [3, 4], [5, 4, 3, 2, 1]),
        ("b", 5, True, [4], [4, 3, 2, 1]),  # not even a's commit 3 has to be certified: a is not in doubt
        ("b", 5, True, [], [4, 3, 2, 1]),
        ("other", 2, False, [], [5, 4, 3, 2, 1]),
        ("host", 1, True, [], [5, 4, 3, 2, 1]),  # nothing would be left
    ],
)
def test_the_commits_of_a_faulty_machine_since_the_newest_certified_one(
    line: Line, host: str, commit: int, is_own: bool, certified: list[int], kept: list[int]
) -> None:
    for number in certified:
        certify(line, number)
    said = roll_back(line.journal, verdict(host, commit, is_own=is_own))
    assert [each.number for each in line.journal.candidates()] == kept
    number = max(kept)
    is_rolled_back = said.startswith(f"run run is rolled back to commit {number} (step {number * STEPS_PER_EPOCH}): ")
    assert is_rolled_back is (number < 5), said
    roll_back(line.journal, verdict(host, commit, is_own=is_own))
    assert [each.number for each in line.journal.candidates()] == kept, "a second call changes nothing"


def test_the_commits_of_a_machine_since_its_release_stay(line: Line) -> None:
    """The audits that a rollback relied on are read again by each later audit."""
    found = verdict("a", 3, is_own=True, at=now())
    store = open_store(line.journal.store_url)
    assert quarantine_machine(store, line.journal.run, found)
    roll_back(line.journal, found)
    release_machine(store, "a")
    time.sleep(1.1)  # records have whole seconds
    again = continue_on(line, "a")
    train(again)
    assert list_candidates(again) == [6, 2, 1]
    roll_back(again.journal, found)
    assert list_candidates(again) == [6, 2, 1]
    worse = verdict("a", 6, is_own=True, at=now())
    assert "is rolled back to commit 2" in roll_back(again.journal, worse)


def test_an_interrupted_rollback_of_a_held_run_is_finished_by_the_next(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verdict("a", 3, is_own=True, at=now())
    stop_run(line.journal, found)

    def interrupt(journal: Journal) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("holdfast.extensions.quarantine.rollback.release_run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            roll_back(line.journal, found)
    assert list_candidates(line) == [2, 1]
    assert find_hold(line.journal)
    said = roll_back(line.journal, found)
    assert said.startswith("run run has no commit of a after its newest certified commit, and released: ")
    assert find_hold(line.journal) is None


def test_a_rollback_leaves_a_hold_for_another_machine(line: Line) -> None:
    stop_run(line.journal, verdict("a", 3, is_own=True, at=now()))
    assert roll_back(line.journal, verdict("b", 5, is_own=True, at=now())).endswith("quarantined 5")
    assert find_hold(line.journal)


def test_nothing_is_rolled_back_to_checkpoints_that_are_lost(line: Line) -> None:
    for number in (1, 2):
        shutil.rmtree(Path(line.journal.store.url) / line.journal.read_commit(number).path)
    assert "isn't rolled back: no checkpoint before commit 3" in roll_back(line.journal, verdict("a", 3, is_own=True))
    assert list_candidates(line) == [5, 4, 3, 2, 1]


def test_a_run_whose_first_commit_is_wrong_begins_anew_or_stays(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    for _ in range(2):
        train(line)
    said = roll_back(line.journal, find_wrong(line, 1))
    assert (
        "host has trained commit 1 wrongly, and no checkpoint before it verifies; train a run of another name" in said
    )
    assert list_candidates(line) == [2, 1]


def find_wrong(line: Line, number: int) -> AuditVerdict:
    """Put two audits of a commit on record that agree on different bytes; return the verdict."""
    for host in ("b", "c"):
        record = AuditRecord(
            commit=number, number=1, from_commit=number - 1, checkpoint_sha256="f" * 64, notes=[], host=host,
            environment={}, created_at=now(),
        )  # fmt: skip
        record_audit(line.journal, record)
    found = read_verdict(line.journal, line.journal.read_commit(number))
    assert found is not None
    assert (found.kind, found.host, found.is_own) == ("machine", "host", True)
    return found


def test_audits_that_look_for_a_right_commit_go_back_twice_as_far_each_time(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    for _ in range(12):
        train(line)
    chosen, number = [], 11  # nobody has audited commit 12
    while True:
        found = find_wrong(line, number)
        assert "isn't rolled back" in roll_back(line.journal, found)
        if (commit := choose_to_certify(line.journal, found)) is None:
            break
        chosen.append(number := commit.number)
    assert chosen == [10, 8, 4, 1]


def test_no_audit_is_needed_where_the_run_can_go_back(line: Line) -> None:
    wrong = find_wrong(line, 2)
    right = choose_to_certify(line.journal, wrong)
    assert right is not None
    assert right.number == 1
    certify(line, 1)
    assert choose_to_certify(line.journal, wrong) is None
    assert "is rolled back to commit 1" in roll_back(line.journal, wrong)
    assert choose_to_certify(line.journal, verdict("a", 3, is_own=False)) is None


def test_a_run_does_not_go_back_to_a_commit_that_the_gate_refuses(line: Line) -> None:
    for number in (1, 3):
        certify(line, number)
    refused = AuditRecord(
        commit=4, number=1, from_commit=3, checkpoint_sha256="", notes=[], host="c", environment={}, created_at=now()
    )
    record_audit(line.journal, refused)
    assert "is rolled back to commit 2" in roll_back(line.journal, verdict("a", 4, is_own=True))
    assert list_candidates(line) == [2, 1], "3 is a's, and certified, but no run continues from it"


def test_a_run_goes_back_once_a_commit_before_the_wrong_ones_is_certified(line: Line) -> None:
    wrong = find_wrong(line, 2)
    assert len(keep_verdict(line.journal, wrong, "rollback")) == 2
    assert "isn't rolled back" in "".join(go_back_now(line.journal))
    certify(line, 1)
    assert "is rolled back to commit 1" in "".join(go_back_now(line.journal))
    assert list_candidates(line) == [1]
    assert go_back_now(line.journal) == []


def test_a_circle_of_parents_ends_a_rollback(line: Line) -> None:
    path = Path(line.journal.store.url) / record_name("commits", 3)
    record = line.journal.read_commit(3).model_copy(update={"parent": 5})
    path.write_bytes(record.to_bytes())
    roll_back(Journal(open_store(line.journal.store_url), line.journal.run), verdict("a", 4, is_own=True))


def test_a_commit_that_a_killed_attempt_made_on_a_quarantined_parent_does_not_count(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_back(line.journal, verdict("a", 3, is_own=True))
    time.sleep(1.1)  # records have whole seconds
    with monkeypatch.context() as killed:  # between the commit's record and the look at its parent
        killed.setattr(Journal, "_check_parent", lambda journal, commit: None)
        train(line)
    assert list_candidates(line) == [6, 2, 1]
    again = continue_on(line, "b")
    assert again.head
    assert again.head.number == 2
    assert line.journal.is_quarantined(6)


def test_a_parent_that_is_quarantined_later_leaves_its_child(line: Line) -> None:
    line.journal.quarantine(4, "a disk lost it", line.attempt)
    again = continue_on(line, "b")
    assert again.head
    assert again.head.number == 5


def test_an_attempt_does_not_commit_on_a_commit_that_was_quarantined_meanwhile(line: Line) -> None:
    roll_back(line.journal, verdict("a", 3, is_own=True))
    with pytest.raises(ParentQuarantined, match="commit 6 of run 'run' doesn't count: it continues from commit 5"):
        train(line)
    assert line.journal.is_quarantined(6)
    resume(line)
    assert line.head
    assert line.head.number == 2
    assert train(line).number == 7


def test_two_faults_of_one_machine_are_both_taken_back(tmp_path: Path) -> None:
    """An audit has certified commit 4, which continues the wrong commit 3 correctly; nobody has audited 3 yet."""
    line = make_line(LocalStore(str(tmp_path)))
    for _ in range(6):
        train(line)
    for number in (1, 4):
        certify(line, number)
    second = find_wrong(line, 6)
    assert find_base(line.journal, second) == 1
    assert "is rolled back to commit 1 " in roll_back(line.journal, second)
    assert list_candidates(line) == [1]


def test_an_audit_that_begins_before_several_commits_certifies_all_of_them(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    for _ in range(6):
        train(line)
    wrong = find_wrong(line, 6)
    assert "--from 0 an audit of a later one certifies all up to it); in doubt are the commits 1-6" in roll_back(
        line.journal, wrong
    )
    chosen = choose_to_certify(line.journal, wrong)
    assert chosen
    assert (chosen.number, find_base(line.journal, wrong)) == (5, 0)
    certify(line, 5, from_commit=0)
    assert "is rolled back to commit 5 " in "".join(keep_verdict(line.journal, wrong, "rollback"))
