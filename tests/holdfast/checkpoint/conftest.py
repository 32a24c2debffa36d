"""Fixtures of the tests of checkpoints."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store import Writer
from holdfast.store.local import LocalStore
from tests.support.waiting import WITHIN_S


@pytest.fixture
def folder(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event before which the store creates no file."""
    gate, creating = threading.Event(), LocalStore.creating

    @contextlib.contextmanager
    def waiting(store: LocalStore, name: str) -> Iterator[Writer]:
        assert gate.wait(WITHIN_S)
        with creating(store, name) as writer:
            yield writer

    monkeypatch.setattr(LocalStore, "creating", waiting)
    return gate
