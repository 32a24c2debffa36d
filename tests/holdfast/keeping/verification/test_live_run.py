"""Verification of a run while other processes write to it, with several files read in parallel."""

import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.checkpoint import PAYLOAD
from holdfast.errors import StoreError
from holdfast.journal import Journal
from holdfast.store.local import LocalStore
from tests.support.makers import FILES, save_next, train
from tests.support.verified import LIVE, check, numbers, pruned
from tests.support.waiting import WITHIN_S


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("verbs", [("size_bytes",), ("pieces", "fill")], ids=["sizes", "bytes"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_no_damage(
    line: Line, monkeypatch: pytest.MonkeyPatch, verbs: tuple[str, ...], nth: int, deep: bool
) -> None:
    """The folder is deleted before the nth access to it, from the first size to the last read of a deep check."""
    looks, has_gone = 0, False

    def going(whole: Callable[..., Any], store: LocalStore, name: str, *args: Any) -> Any:
        nonlocal looks, has_gone
        looks += name.startswith("epoch-0005/")
        if looks == nth and not has_gone:
            has_gone = True
            store.create("pruned/00000005.json", pruned(line, 5))
            store.delete_folder("epoch-0005")
        return whole(store, name, *args)

    for verb in verbs:
        whole = getattr(LocalStore, verb)
        monkeypatch.setattr(LocalStore, verb, lambda store, *args, whole=whole: going(whole, store, *args))
    report = check(line, deep=deep)
    assert report.problems == []
    assert has_gone == (deep or nth <= len(FILES))
    assert numbers(report.checkpoints) == ([7, 6, 2] if has_gone else LIVE)


def test_a_checkpoint_deleted_without_a_pruned_record_is_damage(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = LocalStore.pieces

    def going(store: LocalStore, name: str, *args: Any) -> Iterator[bytes]:
        if name == f"epoch-0005/{PAYLOAD}":
            shutil.rmtree(store.root / "epoch-0005")
        return pieces(store, name, *args)

    monkeypatch.setattr(LocalStore, "pieces", going)
    problems = check(line).problems
    assert len(problems) == 3
    assert f"epoch-0005/{PAYLOAD} is missing but was committed as" in problems[0]


def test_debris_that_is_deleted_while_it_is_read_is_skipped(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_next(line)
    pieces = LocalStore.pieces

    def going(store: LocalStore, name: str, *args: Any) -> Iterator[bytes]:
        if name.startswith(saved.path):
            store.delete_folder(saved.path)
        return pieces(store, name, *args)

    monkeypatch.setattr(LocalStore, "pieces", going)
    report = check(line, everything=True)
    assert (report.ok, report.notes) == (True, [])


@pytest.mark.parametrize("is_before", [True, False])
def test_a_commit_made_during_verification_is_no_problem(
    line: Line, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    listed = Journal.numbers

    def committing(journal: Journal, folder: str, after: int = 0) -> list[int]:
        if folder != "commits":
            return listed(journal, folder, after)
        with monkeypatch.context() as undone:
            undone.setattr(Journal, "numbers", listed)
            if is_before:
                train(line)
            found = listed(journal, folder, after)
            if not is_before:
                train(line)
            return found

    monkeypatch.setattr(Journal, "numbers", committing)
    report = check(line)
    assert (report.problems, report.notes) == ([], [])


def test_several_files_are_read_at_once(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read waits until all other checkpoints are being read too."""
    barrier = threading.Barrier(len(LIVE), timeout=WITHIN_S)
    pieces = LocalStore.pieces

    def together(store: LocalStore, name: str, *args: Any) -> Iterator[bytes]:
        if name.endswith(PAYLOAD):
            barrier.wait()
        return pieces(store, name, *args)

    monkeypatch.setattr(LocalStore, "pieces", together)
    assert check(line).ok


def test_a_store_failure_stops_all_readers(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does Ctrl-C: terabytes may be left to read."""
    pieces = LocalStore.pieces
    is_reading = threading.Event()

    def failing(store: LocalStore, name: str, *args: Any) -> Iterator[bytes]:
        if name == f"epoch-0007/{PAYLOAD}":
            assert is_reading.wait(WITHIN_S)
            raise StoreError("the disk says no")
        if name == f"epoch-0006/{PAYLOAD}":
            is_reading.set()
            while True:
                yield b"without end"
        yield from pieces(store, name, *args)

    monkeypatch.setattr(LocalStore, "pieces", failing)
    with pytest.raises(StoreError, match="the disk says no"):
        check(line)


def test_watch_gets_the_progress_in_bytes(line: Line) -> None:
    seen: list[tuple[int, int]] = []
    report = check(line, watch=lambda done, total: seen.append((done, total)))
    done = [done for done, _ in seen]
    total = sum(entry.size_bytes for entry in report.checkpoints)
    assert len(done) >= len(LIVE)
    assert done == sorted(set(done))
    assert {total for _, total in seen} == {total}
    assert seen[-1] == (total, total)
