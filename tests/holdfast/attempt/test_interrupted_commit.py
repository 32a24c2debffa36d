"""A commit that is interrupted at any write is finished by the next call, or by the next attempt."""

import functools
from typing import Any

import pytest

from holdfast.attempt import line as line_module
from holdfast.journal import Journal
from holdfast.store.local import LocalStore
from tests.support.makers import Keys, assert_good, load, make_line, resume, save_next, train


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two records are made in the same second."""
    times = iter(range(10, 60))
    monkeypatch.setattr(line_module, "now", lambda: f"2026-01-01T00:00:{next(times)}+00:00")


def interrupt(monkeypatch: pytest.MonkeyPatch, verb: str, name: str, is_before: bool) -> None:
    """Ctrl-C comes as the store writes this name: once."""
    whole = getattr(LocalStore, verb)
    is_over = False

    @functools.wraps(whole)
    def interrupted(store: LocalStore, written: str, *args: Any) -> Any:
        nonlocal is_over
        if is_over or not written.startswith(name):
            return whole(store, written, *args)
        is_over = True
        if not is_before:
            whole(store, written, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, verb, interrupted)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize(
    ("verb", "name"),
    [("replace", "signatures/"), ("create", "commits/"), ("replace", "metrics/"), ("replace", "latest.json")],
)
@pytest.mark.usefixtures("ticking")
def test_a_commit_that_was_interrupted_is_finished_by_doing_it_again(
    store: LocalStore,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    name: str,
    is_before: bool,
    is_signed: bool,
) -> None:
    if name == "signatures/" and not is_signed:
        return
    signing, trusted = keys[0]
    line = make_line(store, signing_key=signing if is_signed else None)
    train(line)
    saved = save_next(line)
    with monkeypatch.context() as undone:
        interrupt(undone, verb, name, is_before)
        with pytest.raises(KeyboardInterrupt):
            line.commit(saved, "chunk")
    assert line.commit(saved, "preempted") == line.head == Journal(store, "run").read_commit(2)
    assert train(line).number == 3
    assert line.journal.numbers("commits") == [1, 2, 3]
    assert_good(store, *([trusted] if is_signed else []))


@pytest.mark.parametrize("name", ["commits/", "metrics/", "latest.json"])
@pytest.mark.usefixtures("ticking")
def test_a_commit_that_was_interrupted_for_good_is_the_next_attempts_head(
    store: LocalStore, keys: Keys, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    signing, trusted = keys[0]
    line = make_line(store, signing_key=signing)
    train(line)
    saved = save_next(line)
    with monkeypatch.context() as undone:
        interrupt(undone, "create" if name == "commits/" else "replace", name, is_before=name != "commits/")
        with pytest.raises(KeyboardInterrupt):
            line.commit(saved, "chunk")
    after = make_line(store, trusted_keys=[trusted])
    assert after.head == Journal(store, "run").read_commit(2)
    assert load(after.journal.store, after.head) is None
    assert_good(store, trusted)


@pytest.mark.usefixtures("ticking")
def test_what_was_begun_before_a_fall_back_is_not_committed_after_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line(store)
    train(line)
    saved = save_next(line)
    with monkeypatch.context() as undone:
        interrupt(undone, "create", "commits/", is_before=True)
        with pytest.raises(KeyboardInterrupt):
            line.commit(saved, "chunk")
    resume(line)  # which adopts it, as what it is now
    assert line.head
    assert (line.head.number, line.head.path, line.head.why) == (2, saved.path, "adopted")
    assert_good(store)
