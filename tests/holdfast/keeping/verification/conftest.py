"""Fixtures of the verification tests: a run of seven signed commits, of which four count, and a copy for each test."""

import shutil
from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.config import Retention
from holdfast.journal import Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.store.local import LocalStore
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH, Keys, make_line, resume, train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    """Make a run of seven signed commits: 3 is quarantined, 1 and 4 are pruned, 2 is pinned."""
    store = LocalStore(str(tmp_path_factory.mktemp("store")))
    line = make_line(store, signing_key=keys[0][0])
    for _ in range(5):
        train(line)
    line.journal.pin(2)
    line.journal.quarantine(3, "damaged", 1)
    prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    for _ in range(2):
        train(line)
    return store.root


@pytest.fixture
def line(made: Path, tmp_path: Path) -> Line:
    """Return a copy of the run, held by its only attempt."""
    shutil.copytree(made, tmp_path / "store")
    line = Line(Journal(LocalStore(str(tmp_path / "store")), "run"), 1, SETTINGS, STEPS_PER_EPOCH)
    resume(line)
    return line
