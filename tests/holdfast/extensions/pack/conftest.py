"""Fixtures of the pack tests: a run of three commits, its newest commit packed, and an empty store to unpack into."""

from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.store.local import LocalStore
from tests.support.makers import make_line, train
from tests.support.packing import packed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with one run of three commits."""
    store = LocalStore(str(tmp_path_factory.mktemp("made")))
    line = make_line(store)
    for _ in range(3):
        train(line, size_bytes=320)
    return store.root


@pytest.fixture(scope="module")
def good(made: Path) -> bytes:
    """Return the newest commit, packed."""
    return packed(Journal(LocalStore(str(made)), "run"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return an empty store in a folder of its own."""
    (tmp_path / "store").mkdir()
    return LocalStore(str(tmp_path / "store"))
