"""Tests of the attempts that died without a word, as the records tell them."""

from pathlib import Path

from holdfast.extensions.metrics.books import MOST_DEAD, Books
from holdfast.extensions.metrics.readings import Readings
from holdfast.journal import AttemptRecord, Commit, EndingRecord, Journal, format_time
from holdfast.ledger.timeline import Records
from holdfast.store import open_store
from tests.support.makers import make_commit

BEGAN = 1_700_000_000.0


def attempt(number: int, at: float) -> AttemptRecord:
    return AttemptRecord(
        number=number, why="retry", created_at=format_time(BEGAN + at), host="a", pid=1, writer=f"token-{number}",
        environment={},
    )  # fmt: skip


def ending(number: int, reason: str, at: float) -> EndingRecord:
    return EndingRecord(number=number, reason=reason, message="", step=0, created_at=format_time(BEGAN + at))


def commit(number: int, attempt: int, at: float, *, why: str = "chunk", trained_at: float | None = None) -> Commit:
    trained = format_time(BEGAN + (at - 2 if trained_at is None else trained_at))
    return make_commit(
        number, attempt=attempt, step=10 * number, created_at=format_time(BEGAN + at), why=why, trained_at=trained,
        train_s=5.0,
    )  # fmt: skip


def books(tmp_path: Path, *records: AttemptRecord | EndingRecord | Commit) -> Books:
    made = Books(Journal(open_store(str(tmp_path)), "run"), Readings({"run": "run"}))
    found = Records()
    for each in records:
        folder = {AttemptRecord: found.attempts, EndingRecord: found.endings, Commit: found.commits}[type(each)]
        folder[each.number] = each  # type: ignore[index, assignment]
    made._records = found
    return made


def test_a_dead_attempt_ends_with_its_last_sign(tmp_path: Path) -> None:
    found = books(
        tmp_path, attempt(1, 0), commit(1, 1, 20), commit(2, 1, 40), attempt(2, 100), ending(1, "vanished", 100)
    ).find_dead(2)
    (dead,) = found
    assert (dead.number, dead.key, dead.began, dead.ended) == (1, "token-1", BEGAN, BEGAN + 40)
    assert (dead.message, dead.attributes["holdfast.step"]) == ("vanished", 20)


def test_a_save_that_the_next_attempt_adopted_is_a_sign_of_the_dead_one(tmp_path: Path) -> None:
    adopted = commit(2, 2, 103, why="adopted", trained_at=70)
    (dead,) = books(tmp_path, attempt(1, 0), commit(1, 1, 20), attempt(2, 100), adopted).find_dead(2)
    assert (dead.ended, dead.attributes["holdfast.step"]) == (BEGAN + 70, 20)


def test_an_attempt_without_a_commit_has_no_length(tmp_path: Path) -> None:
    (dead,) = books(tmp_path, attempt(1, 0), attempt(2, 100)).find_dead(2)
    assert (dead.began, dead.ended, dead.attributes["holdfast.reason"]) == (BEGAN, BEGAN, "vanished")


def test_only_the_attempts_right_before_that_died_are_found(tmp_path: Path) -> None:
    records = [attempt(number, 100 * number) for number in range(1, 7)]
    ended = [ending(1, "vanished", 200), ending(3, "preempted", 350), ending(4, "crashed", 480)]
    found = books(tmp_path, *records, *ended)
    assert [each.number for each in found.find_dead(6)] == [5, 4]
    assert [each.number for each in found.find_dead(4)] == []
    assert [each.number for each in found.find_dead(2)] == [1]
    assert found.find_dead(1) == []
    many = books(tmp_path, *(attempt(number, 100 * number) for number in range(1, 20)))
    assert [each.number for each in many.find_dead(19)] == [*range(18, 18 - MOST_DEAD, -1)]


def test_before_the_records_are_read_nobody_is_known(tmp_path: Path) -> None:
    made = Books(Journal(open_store(str(tmp_path)), "run"), Readings({"run": "run"}))
    assert (made.is_read, made.find_dead(3)) == (False, [])
