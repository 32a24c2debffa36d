"""Tests of the choice of runs: all of a small store, the newest of a large one, with a bounded number of requests."""

import os
from pathlib import Path

import pytest

from holdfast.cli.app import app
from holdfast.journal import Journal, runs
from holdfast.journal.runs import choose_runs, find_runs
from holdfast.store import Store, open_store
from holdfast.store.local import LocalStore
from tests.bench.counting import Tally, counted
from tests.support.makers import make_line, train

COUNT = 12
FIRST_BEGAN = 1_780_000_000


@pytest.fixture
def crowd(tmp_path: Path) -> Store:
    """A store of twelve runs. The names sort from the newest to the oldest."""
    store = open_store(str(tmp_path))
    for age in range(COUNT):
        Journal(store, f"run-{age:02d}").begin("m:f")
        os.utime(tmp_path / f"run-{age:02d}" / "run.json", (FIRST_BEGAN - age,) * 2)
    (tmp_path / "sweep.html").write_text("a page among the runs", "utf-8")
    (tmp_path / "notes").mkdir()
    return store


@pytest.fixture
def is_distant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder count as a storage behind a network."""
    monkeypatch.setattr(LocalStore, "is_disk", False)


def names(journals: list[Journal]) -> list[str]:
    return [journal.run for journal in journals]


def test_all_runs_are_in_order_of_their_names(crowd: Store) -> None:
    chosen = choose_runs(crowd, None)
    assert names(chosen.journals) == [f"run-{age:02d}" for age in range(COUNT)] == names([*find_runs(crowd)])
    assert chosen.note == ""


def test_of_too_many_runs_the_newest_are_chosen(crowd: Store, tmp_path: Path) -> None:
    train(make_line(crowd, "run-07"))  # a commit makes it the newest
    chosen = choose_runs(crowd, 3)
    assert names(chosen.journals) == ["run-07", "run-00", "run-01"]
    assert chosen.note == "3 of 12 runs, the newest"


@pytest.mark.usefixtures("is_distant")
def test_a_bucket_is_asked_once_for_each_run_and_not_at_all_for_very_many(
    crowd: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally()
    with tally.measuring():
        assert names(choose_runs(counted(crowd, tally), 2).journals) == ["run-00", "run-01"]
    assert tally.requests <= 1 + 2 * (COUNT + 2)
    monkeypatch.setattr(runs, "MOST_ASKED", 10)
    with tally.measuring():
        chosen = choose_runs(counted(crowd, tally), 2)
    assert (names(chosen.journals), chosen.note) == (["run-11", "run-10"], "2 of 14 runs, the last by name")
    assert tally.requests <= 1 + 2 + 2


def test_a_run_that_cannot_be_looked_at_is_listed_last(crowd: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    look = LocalStore.modified

    def fail(store: LocalStore, name: str) -> object:
        if store.root.name == "run-00":
            raise runs.Unreadable("a bad sector")
        return look(store, name)

    monkeypatch.setattr(LocalStore, "modified", fail)
    assert names(choose_runs(crowd, COUNT - 1).journals)[0] == "run-01"
    assert "run-00" in names(choose_runs(crowd, COUNT).journals)


def test_a_list_says_how_to_see_the_rest(crowd: Store, capsys: pytest.CaptureFixture[str]) -> None:
    show = ["show", "--store", crowd.url]
    assert app([*show, "--limit", "2"], result_action="return_value") == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["run", "run-00", "run-01"]
    assert printed.err == "2 of 12 runs, the newest; --limit 12 shows all\n"
    assert app([*show, "--limit", "14"], result_action="return_value") == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 + COUNT
    assert printed.err == ""


def test_an_index_says_which_runs_it_has(crowd: Store) -> None:
    index = pytest.importorskip("holdfast.extensions.report.index")
    chosen = choose_runs(crowd, 2)
    page = index.make_index(crowd, index.read_rows(chosen), note=chosen.note)
    assert "2 of 12 runs, the newest." in page
    assert "run-01" in page
    assert "run-02" not in page


def test_a_watch_of_a_large_store_adds_runs_that_begin(crowd: Store) -> None:
    reader = pytest.importorskip("holdfast.extensions.watch.reading").StoreReader(crowd, 2)
    assert [seen.run for seen in reader.begin()] == ["run-00", "run-01"]
    assert reader.note == "2 of 12 runs, the newest"
    Journal(crowd, "begun").begin("m:f")
    assert sum(reader.poll() for _ in range(5)) == 1
    assert [seen.run for seen in reader.seen] == ["begun", "run-00", "run-01"]


@pytest.mark.usefixtures("is_distant")
def test_requests_do_not_grow_with_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd_bench = pytest.importorskip("tests.bench.crowd")
    monkeypatch.setattr(runs, "MOST_ASKED", 30)
    monkeypatch.setattr(crowd_bench, "MOST_SHOWN", 10)
    rows = crowd_bench.measure("folder", open_store(str(tmp_path)), (40, 80))
    grown = {}
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        assert small["operation"] == large["operation"]
        grown[small["operation"]] = int(str(large["requests"])) - int(str(small["requests"]))
    assert grown == {
        "audit, prune: find the runs": 40, "report STORE": 0, "show --store": 0, "watch STORE, 5 polls": 0,
        "watch STORE, its start": 0,
    }  # fmt: skip
