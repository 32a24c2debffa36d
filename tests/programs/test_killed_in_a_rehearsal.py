"""Kills at each moment of a rehearsal: the same command continues to the same bytes, and nothing is left behind."""

import itertools
from pathlib import Path

import psutil
import pytest

from holdfast.keeping.verification import verify_run
from holdfast.machine.faults import REHEARSAL_POINTS
from holdfast.testing.faults import fault
from tests.conftest import IS_SOAK
from tests.support.lives import Lives
from tests.support.processes import log_of
from tests.support.rehearsed import REHEARSED, Program, find_straight
from tests.support.waiting import await_equal

pytestmark = pytest.mark.slow

# The first rehearsal is inside a chunk, the second goes across the commit at an epoch's end, the third begins at a
# commit.
ALL = list(itertools.product(REHEARSAL_POINTS, ["self", "other", "both"], ["beside", "alone"], [1, 2, 3]))


@pytest.mark.parametrize(("point", "victim", "way", "nth"), ALL if IS_SOAK else ALL[::11])
def test_it_ends_on_the_same_bytes(nursery: Lives, tmp_path: Path, point: str, victim: str, way: str, nth: int) -> None:
    program = Program(nursery, tmp_path / "killed", "support.forgetting:exact", {}, epochs=2 * nth + 1)
    settings, struck = (*REHEARSED, f"proof.beside={str(way == 'beside').lower()}"), tmp_path / "struck"
    killed = program.train(*settings, **fault(point, nth, victim, struck))
    assert struck.exists(), killed.stderr
    assert killed.returncode == (0 if victim == "other" else -9), killed.stderr
    done = program.train(*settings)
    assert done.returncode == 0, done.stderr
    assert program.find_content() == find_straight(nursery, tmp_path / "straight", program)
    assert verify_run(program.journal).problems == []
    assert program.journal.store.list("rehearsing") == []
    await_equal(lambda: [pid for pid in psutil.pids() if log_of(pid).startswith(str(tmp_path))], [])
