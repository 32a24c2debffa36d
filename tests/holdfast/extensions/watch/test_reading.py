"""A watched run is read in few requests: a start that doesn't grow with the run, and one listing a poll."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import RunGone, RunUnknown, WrongUse
from holdfast.extensions.watch.reading import TURNS, RunReader, StoreReader
from holdfast.journal import Journal, record_name
from holdfast.journal.endings import Ending
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from tests.support.makers import claim, write_later_format
from tests.support.watched import add_commit, make_long_run

# A start reads 40 commits, 6 attempts and their endings, and ten other records.
START = 70


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the requests to local stores, by verb."""
    counts: Counter[str] = Counter()

    def counting(verb: str) -> Callable[..., object]:
        own = getattr(LocalStore, verb)

        def call(self: LocalStore, *arguments: object, **options: object) -> object:
            counts[verb] += 1
            return own(self, *arguments, **options)

        return call

    for verb in ("list", "read", "pieces", "size_bytes", "modified", "create", "replace", "delete"):
        monkeypatch.setattr(LocalStore, verb, counting(verb))
    return counts


def begin(folder: Path, commits: int = 12, *, is_ended: bool = False) -> RunReader:
    make_long_run(str(folder), "long", commits, epochs=2 * commits, is_ended=is_ended)
    reader = RunReader(Journal(open_store(str(folder)), "long"))
    reader.begin()
    return reader


def poll_all(reader: RunReader) -> list[bool]:
    return [reader.poll() for _ in TURNS]


@pytest.mark.parametrize("commits", [3, 300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_start_doesnt_grow_with_the_run(tmp_path: Path, requests: Counter[str], commits: int) -> None:
    journal = make_long_run(str(tmp_path), "long", commits, epochs=2 * commits, is_ended=False)
    requests.clear()
    reader = RunReader(journal, ledger_commits=0)
    seen = reader.begin()
    assert requests.total() <= START
    assert (seen.newest, seen.head.step if seen.head else 0, seen.total_steps) == (commits, commits * 10, commits * 20)
    assert [ending.reason for ending in seen.endings] == ["preempted", "vanished", "out_of_memory"]
    requests.clear()
    assert not any(poll_all(reader))
    assert requests == {"list": len(TURNS)}


def test_a_short_run_has_a_ledger(tmp_path: Path) -> None:
    assert begin(tmp_path).seen.ledger is not None


def test_a_new_commit_is_found(tmp_path: Path) -> None:
    reader = begin(tmp_path)
    before = reader.seen.sign_at
    commit = add_commit(reader.journal)
    assert any(poll_all(reader))
    assert reader.seen.head == commit
    assert reader.seen.sign_at > before
    assert not any(poll_all(reader))


def test_an_ending_and_the_next_attempt_are_found(tmp_path: Path) -> None:
    reader = begin(tmp_path)
    other = Journal(open_store(str(tmp_path)), "long")
    other.end_attempt(4, Ending("preempted", "told"))
    assert any(poll_all(reader))
    found = reader.seen.find_ending(4)
    assert found is not None
    assert found.message == "told"
    claim(other, 5)
    assert any(poll_all(reader))
    assert reader.seen.last_attempt == 5
    assert reader.seen.find_ending(5) is None


def test_a_quarantined_commit_doesnt_count(tmp_path: Path) -> None:
    reader = begin(tmp_path)
    Journal(open_store(str(tmp_path)), "long").quarantine(12, "damaged", 4)
    assert any(poll_all(reader))
    assert reader.seen.quarantined == (12,)
    assert reader.seen.head is not None
    assert reader.seen.head.number == 11


def test_a_complete_run_that_is_trained_further_is_not_complete(tmp_path: Path) -> None:
    journal = make_long_run(str(tmp_path), "long", 12)
    reader = RunReader(journal)
    assert reader.begin().is_complete
    claim(Journal(open_store(str(tmp_path)), "long"), 5)
    poll_all(reader)
    assert not reader.seen.is_complete


def test_damaged_and_lost_records_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    journal = make_long_run(str(tmp_path), "long", 12)
    folder = Path(journal.store.url)
    (folder / record_name("commits", 5)).write_text("{}")
    (folder / record_name("commits", 9)).unlink()
    (folder / record_name("attempts", 2)).write_text("damaged")
    (folder / "latest.json").unlink()
    (folder / "run.json").write_text("\x1b[2Jdamaged")
    seen = RunReader(Journal(open_store(str(tmp_path)), "long")).begin()
    assert [commit.number for commit in seen.commits] == [1, 2, 3, 4, 6, 7, 8, 10, 11, 12]
    assert [line.partition(" ")[0] for line in seen.missing] == [
        "attempts/00000002.json", "commits/00000005.json", "commits/00000009.json", "run.json",
    ]  # fmt: skip
    assert seen.attempts[1] == (2, None)


def test_a_run_that_is_deleted_while_it_is_watched_is_gone(tmp_path: Path) -> None:
    reader = begin(tmp_path)
    reader.journal.store.delete_folder("commits")
    (tmp_path / "long/run.json").unlink()
    with pytest.raises(RunGone):
        poll_all(reader)


def test_no_run_and_a_run_of_a_later_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunUnknown):
        RunReader(Journal(open_store(str(tmp_path)), "none")).begin()
    write_later_format(make_long_run(str(tmp_path), "later", 1))
    with pytest.raises(
        WrongUse, match="run 'later' is stored in format 9; this version of Holdfast reads formats up to 1"
    ):
        RunReader(Journal(open_store(str(tmp_path)), "later")).begin()


def test_a_store_shows_every_run_and_finds_new_ones(tmp_path: Path, requests: Counter[str]) -> None:
    make_long_run(str(tmp_path), "one", 3)
    write_later_format(make_long_run(str(tmp_path), "two", 3))
    reader = StoreReader(open_store(str(tmp_path)))
    assert [(seen.run, bool(seen.problem)) for seen in reader.begin()] == [("one", False), ("two", True)]
    requests.clear()
    assert not reader.poll()
    assert requests == {"list": 1}
    make_long_run(str(tmp_path), "three", 3)
    assert any(reader.poll() for _ in range(6))
    assert [seen.run for seen in reader.seen] == ["one", "three", "two"]
