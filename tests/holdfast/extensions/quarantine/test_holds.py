"""Holds of a run: who holds it, whom they stop, and what ends them."""

import time
from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.attempt.opening import Known
from holdfast.cli.app import app
from holdfast.errors import RunHeld, WrongUse
from holdfast.extensions.quarantine.holds import find_hold, hold_run, release_run
from holdfast.extensions.quarantine.rollback import stop_run
from holdfast.journal import AttemptRecord, Journal, now
from holdfast.journal.trainers import list_trainers
from holdfast.journal.verdict import AuditVerdict
from holdfast.keeping.verification import verify_run
from holdfast.ledger.timeline import find_trainer
from holdfast.store.local import LocalStore
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH, make_commit, make_line, resume, root, save_next, train


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Return a line with two commits of the machine host."""
    line = make_line(LocalStore(str(tmp_path)))
    train(line)
    train(line)
    return line


def verdict(host: str = "host", commit: int = 2, at: str = "2020-01-01T00:00:00+00:00") -> AuditVerdict:
    return AuditVerdict("machine", commit, "it differs", host=host, is_own=True, at=at, agreeing=2, deviating=1)


def test_the_attempt_that_trains_can_not_commit_on(line: Line) -> None:
    saved = save_next(line)
    assert hold_run(line.journal, verdict())
    with pytest.raises(RunHeld, match=r"run 'run' is held: commit 2: machine: it differs") as raised:
        line.commit(saved, "chunk")
    assert (raised.value.exit_code, raised.value.reason) == (3, "held")
    assert f"holdfast release {line.journal.store.url} --rollback" in raised.value.hint
    newest = line.journal.newest()
    assert newest
    assert newest.number == 2


def test_a_hold_is_one_however_often_the_verdict_comes(line: Line) -> None:
    for _ in range(3):
        assert hold_run(line.journal, verdict())
    hold = find_hold(line.journal)
    assert hold
    assert hold.number == line.journal.attempts() == 2
    assert verify_run(line.journal).problems == []


def test_a_release_ends_the_hold_until_the_machine_deviates_again(line: Line) -> None:
    with pytest.raises(WrongUse, match="run 'run' is not held"):
        release_run(line.journal)
    hold_run(line.journal, verdict(at=now()))
    release_run(line.journal)
    line.journal.check_held(line.journal.attempts())
    assert not hold_run(line.journal, verdict()), "the person knew of it"
    time.sleep(1.1)  # records have whole seconds
    assert hold_run(line.journal, verdict(at=now()))
    assert line.journal.attempts() == 4


def test_a_release_says_nothing_of_another_machine(line: Line) -> None:
    """The person who released the run for one machine didn't know of the other."""
    before = now()
    hold_run(line.journal, verdict("a", at=before))
    release_run(line.journal)
    assert not hold_run(line.journal, verdict("a", at=before))
    assert hold_run(line.journal, verdict("b", at=before))
    release_run(line.journal)
    assert not hold_run(line.journal, verdict("a", at=before))


def test_a_lost_hold_is_noticed(line: Line) -> None:
    hold_run(line.journal, verdict())
    (root(line) / "attempts/00000002.json").unlink()
    problems = verify_run(Journal(LocalStore(str(root(line).parent)), "run")).problems
    assert problems == ["attempts/00000002.json is missing"]


def test_a_damaged_hold_holds_until_the_run_is_released(line: Line) -> None:
    hold_run(line.journal, verdict())
    path = root(line) / "attempts/00000002.json"
    path.write_bytes(path.read_bytes().replace(b'"held"', b'"hold"', 1))
    with pytest.raises(RunHeld, match=r"run 'run' is held: commit 2: machine: it differs"):
        line.journal.check_held(2)
    release_run(line.journal)
    line.journal.check_held(3)


def test_an_attempt_that_begins_at_the_same_time_is_held_too(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Journal.claim_attempt
    began: list[int] = []

    def claim_late(journal: Journal, number: int, *fields: object) -> object:
        if not began:
            began.append(number)
            original(journal, number, "continued", "b", 1, {})
        return original(journal, number, *fields)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "claim_attempt", claim_late)
    assert hold_run(line.journal, verdict())
    hold = find_hold(line.journal)
    assert hold
    assert (began, hold.number) == ([2], 3)


def test_a_run_is_held_only_for_a_machine_that_has_trained_it(line: Line) -> None:
    assert (
        stop_run(line.journal, verdict("other")) == "run run has no commit of other after its newest certified commit"
    )
    assert find_hold(line.journal) is None
    assert stop_run(line.journal, verdict()).startswith("run 'run' is held: commit 2: machine: it differs; holdfast")


def test_a_hold_trains_nothing_and_hides_no_lost_attempt(line: Line) -> None:
    """The first attempt vanished; its ranks have saved a checkpoint, which the next one adopts."""
    save_next(line)
    hold_run(line.journal, verdict())
    release_run(line.journal)
    known = Known.read(line.journal)
    line.journal.claim_attempt(4, "continued", "b", 1, {})
    known.record_lost_attempts(line.journal, 4)
    assert [each.reason for each in line.journal.endings()] == ["vanished", "held", "released"]
    later = Line(line.journal, 4, SETTINGS, STEPS_PER_EPOCH)
    resume(later)
    assert later.head
    assert later.head.why == "adopted"
    assert [each.host for each in list_trainers(line.journal, later.head)] == ["host", "b"]


def test_what_is_adopted_belongs_to_the_ranks_that_trained_on_while_the_run_was_held() -> None:
    times = {1: ("fresh", "10:00"), 2: ("held", "11:00"), 3: ("released", "12:00"), 4: ("continued", "13:00")}
    attempts = {
        number: AttemptRecord(
            number=number, why=why, created_at=f"2026-01-01T{at}:00+00:00", host="a", pid=1, environment={}
        )
        for number, (why, at) in times.items()
    }  # fmt: skip
    commit = make_commit(3, attempt=4, why="adopted", trained_at="2026-01-01T11:05:00+00:00")
    assert find_trainer(commit, attempts) == 1


def test_a_skip_leaves_a_run_held(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    train(line)
    train(line)
    url = line.journal.store.url
    hold_run(line.journal, AuditVerdict("machine", 2, "it differs", host="a", at=now()))
    with pytest.raises(SystemExit) as done:
        app(["skip", url, str(4 * STEPS_PER_EPOCH)])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "the run continues from commit 3 (" in out
    assert out.endswith(f"the run is held, and continues once you release it: holdfast release {url}\n")
