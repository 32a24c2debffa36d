"""Kills at each moment of a rehearsal: the same command goes on to the same bytes, and nothing is left behind."""

import contextlib
import itertools
import time
from pathlib import Path

import psutil
import pytest

from holdfast.faults import REHEARSAL_POINTS
from holdfast.testing.faults import fault
from holdfast.verification import verify_run
from tests.conftest import COMMAND_WITHIN_S, IS_SOAK
from tests.support.lives import Lives
from tests.support.rehearsed import REHEARSED, Program, find_straight

pytestmark = pytest.mark.slow


ALL = list(itertools.product(REHEARSAL_POINTS, ["self", "other", "both"], ["beside", "alone"]))


@pytest.mark.parametrize(("point", "victim", "way"), ALL if IS_SOAK else ALL[::2] + ALL[1::8])
def test_it_ends_on_the_same_bytes(nursery: Lives, tmp_path: Path, point: str, victim: str, way: str) -> None:
    program = Program(nursery, tmp_path / "killed", "support.forgetting:exact", {}, epochs=4)
    settings, struck = (*REHEARSED, f"proof.beside={str(way == 'beside').lower()}"), tmp_path / "struck"
    killed = program.train(*settings, **fault(point, 2, victim, struck))
    assert struck.exists(), killed.stderr
    assert killed.returncode == (0 if victim == "other" else -9), killed.stderr
    done = program.train(*settings)
    assert done.returncode == 0, done.stderr
    assert program.find_content() == find_straight(nursery, tmp_path / "straight", program)
    assert verify_run(program.journal).problems == []
    await_end(tmp_path)


def await_end(folder: Path) -> None:
    """Wait until no process writes its standard error into a folder."""
    until = time.monotonic() + COMMAND_WITHIN_S
    while left := [pid for pid in psutil.pids() if find_log(pid).startswith(str(folder))]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def find_log(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    return ""
