"""Stray names among the records: they are noted and ignored, and cost hardly any requests."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.cli import app, run_app
from holdfast.config import Retention
from holdfast.errors import ConfigError
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.journal.names import REACH
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.ledger.standing import read_standing
from holdfast.store.local import LocalStore
from tests.support.makers import STEPS_PER_EPOCH, head_step, make_commit, make_latest, make_line, publish, train

FOLDERS = ("attempts", "endings", "commits", "quarantine", "pruned", "pins", "prunes", "metrics")
STRAYS = ("99999999", "²²²²²²²²", "00000000", "5", "notes", "20261123", "٣٣٣٣٣٣٣٣")


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Return a run of six commits, of which 1 to 3 are pruned and 4 is quarantined."""
    line = make_line(LocalStore(str(tmp_path / "store")))
    for _ in range(6):
        train(line)
    line.journal.end_attempt(1, Ending("preempted", step=head_step(line)))
    line.journal.quarantine(4, "damaged", 1)
    line.journal.pin(6)
    prune_by_policy(line.journal, Retention(keep_last=2), STEPS_PER_EPOCH)
    return line


def root(line: Line) -> Path:
    return Path(line.journal.store.url)


def litter(line: Line, folder: str, names: tuple[str, ...] = STRAYS) -> list[str]:
    """Add stray names to a folder: copies of one of its records, and in ``commits/`` a valid record 99999999."""
    suffix = ".jsonl" if folder == "metrics" else ".json"
    some = min((root(line) / folder).iterdir())
    for name in names:
        shutil.copy(some, root(line) / folder / f"{name}{suffix}")
    if folder == "commits":
        (root(line) / "commits/99999999.json").write_bytes(make_commit(99_999_999, path="epoch-0009").to_bytes())
    return [f"{folder}/{name}{suffix}" for name in names]


@pytest.mark.parametrize("number", [-1, 0, REACH + 2, 20_261_123, 99_999_999, 10**15])
def test_an_attempt_gets_no_number_that_readers_would_ignore(line: Line, number: int) -> None:
    """A person types it into the form of `attempt`. Such an attempt could not fence off any other one."""
    before, names = line.journal.attempts(), line.journal.store.list("attempts")
    with pytest.raises(
        ConfigError, match=f"attempt {number} of run '.*' can't begin: the number is far too high"
    ) as caught:
        line.journal.claim_attempt(number, "fresh", "host", 1, {})
    assert caught.value.hint == f"the next attempt has the number {before + 1}"
    assert line.journal.store.list("attempts") == names


def count(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> int:
    """Return the number of requests to the store that a call makes."""
    asked: list[str] = []
    with monkeypatch.context() as counting:
        for verb in ("read", "list", "size_bytes", "create", "replace", "delete_folder"):
            whole = getattr(LocalStore, verb)

            def counted(*args: Any, whole: Callable[..., Any] = whole, **options: Any) -> Any:
                asked.append(whole.__name__)
                return whole(*args, **options)

            counting.setattr(LocalStore, verb, counted)
        do()
    return len(asked)


@pytest.mark.parametrize("folder", FOLDERS)
def test_stray_names_are_noted_and_ignored(
    line: Line, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fresh() -> Journal:
        return Journal(LocalStore(str(tmp_path / "store")), "run")

    def look() -> list[object]:
        journal = fresh()
        report = prune_by_policy(journal, Retention(keep_last=1), STEPS_PER_EPOCH, dry_run=True)
        assert report
        return [
            read_standing(journal), [*journal.candidates()], journal.attempts(), journal.next_number(), report.kept,
            report.unreadable, journal.endings(), verify_run(journal).problems,
        ]  # fmt: skip

    before = look()
    requests = count(monkeypatch, look)
    names = litter(line, folder)
    caplog.clear()
    assert look() == before
    warned = [record.getMessage() for record in caplog.records]
    for name in names:
        assert len([line for line in warned if f"{name} is not a record of this run; it is ignored" in line]) == 1
    assert count(monkeypatch, look) <= requests + 30  # a few more, to check whether the far number can be reached
    notes = verify_run(fresh()).notes
    assert all(any(name in note for note in notes) for name in names)
    after = make_line(LocalStore(str(tmp_path / "store")))
    assert (after.attempt, after.next_number) == (2, 7)
    assert train(after).number == 7
    assert prune_by_policy(after.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    for command in (
        ["show", "--store", str(tmp_path / "store")],
        ["show", str(root(line))],
        ["verify", str(root(line))],
    ):
        assert run_app(app, command) == 0


def test_latest_that_names_an_unreachable_commit_is_ignored(line: Line, tmp_path: Path) -> None:
    litter(line, "commits")
    line.journal.publish_latest(make_latest(make_commit(88_888_888, path="epoch-0009")))
    journal = Journal(LocalStore(str(tmp_path / "store")), "run")
    assert journal.newest_number() == 6
    assert not [problem for problem in verify_run(journal).problems if "missing" in problem]


def test_a_gap_of_lost_records_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues after lost records, and makes no request for each of them."""
    journal = Journal(LocalStore(str(tmp_path)), "run")
    journal.begin("m:f")
    publish(journal, make_commit(1), make_commit(REACH))
    found: list[list[int]] = []
    requests = count(monkeypatch, lambda: found.append([commit.number for commit in journal.candidates()]))
    assert found == [[REACH, 1]]
    assert requests < 20
    report = prune_by_policy(journal, Retention(keep_last=2), STEPS_PER_EPOCH, dry_run=True)
    assert report
    assert len(report.unreadable) == REACH - 2


def test_a_run_that_was_unpacked_far_from_its_beginning_is_found(tmp_path: Path) -> None:
    journal = Journal(LocalStore(str(tmp_path)), "run")
    record = journal.begin("m:f").model_copy(update={"first_commit": 5 * REACH})
    journal.store.replace("run.json", record.to_bytes())
    journal.store.create("commits/00500000.json", make_commit(5 * REACH, path="epoch-0009").to_bytes())
    journal.store.create("commits/00700002.json", make_commit(7 * REACH + 2, path="epoch-0009").to_bytes())
    assert journal.newest_number() == 5 * REACH
    assert journal.numbers("commits") == [5 * REACH]


@pytest.mark.parametrize("content", [b"", b"notes", None])
def test_a_stray_file_with_a_number_in_reach_is_told_once(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Between it and the newest commit 94 numbers are free, and no commit has any of them."""
    line = make_line(LocalStore(str(tmp_path)))
    for _ in range(4):
        train(line)
    copied = (root(line) / "commits/00000004.json").read_bytes()
    (root(line) / "commits/00000099.json").write_bytes(copied if content is None else content)
    for start in range(2):
        caplog.clear()
        line = line if start == 0 else make_line(LocalStore(str(tmp_path)))
        for _ in range(3):
            train(line)
            prune_by_policy(line.journal, Retention(keep_last=2), STEPS_PER_EPOCH)
        warned = [record.getMessage() for record in caplog.records]
        assert len([each for each in warned if "lost" in each]) == 1
        assert len(warned) == 2, warned  # the other is about the stray file, which the second start quarantines
