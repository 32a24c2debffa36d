"""Fixtures of the report's tests: a run with a rollback on this machine's disk, and a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.extensions.report.gathering import Gatherer, History
from tests.support.chromium import browser, find_browser
from tests.support.long_run import LongRun


@pytest.fixture
def rolled(tmp_path: Path) -> LongRun:
    """Return a run of 20 commits and four attempts, three of whose commits were taken back."""
    return LongRun(tmp_path, "rolled", rolled_back=3)


@pytest.fixture
def history(rolled: LongRun) -> History:
    return Gatherer(rolled.journal).gather()


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """Yield the address of a headless browser's debugging interface."""
    if find_browser() is None:
        pytest.skip("this machine has no Chromium")
    with browser() as address:
        yield address
