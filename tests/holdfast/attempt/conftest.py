"""A store in a folder, and a short line of commits in it."""

from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.store.local import LocalStore
from tests.support.makers import make_line, train


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


@pytest.fixture
def line(store: LocalStore) -> Line:
    """Two commits."""
    line = make_line(store)
    train(line)
    train(line)
    return line
