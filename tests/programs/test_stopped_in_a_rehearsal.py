"""A stop in a step that a rehearsal trains: the next attempt compares its steps with those of the stopped ranks."""

import itertools
from pathlib import Path

import pytest

from holdfast.testing.faults import fault
from tests.conftest import IS_SOAK
from tests.support.lives import Lives
from tests.support.rehearsed import REHEARSED, Program, find_straight, judge
from tests.support.stopped import STOP

pytestmark = pytest.mark.slow

ACTS_AFTER = 20  # in the shadow of each of these stops
ALL = list(itertools.product(["beside", "alone"], [*range(5, 19)]))
# After the commits of steps 8 and 16, at which rehearsals begin.
FEW = [("beside", 16), ("alone", 16), ("alone", 8), ("beside", 11)]


@pytest.mark.parametrize(("way", "step"), ALL if IS_SOAK else FEW)
def test_its_steps_are_compared(nursery: Lives, tmp_path: Path, way: str, step: int) -> None:
    made = ("support.forgetting:counting", {"settings.acts_after": ACTS_AFTER}, 4)
    straight = Program(nursery, tmp_path / "straight", *made, command="tests.support.stopped:train")
    assert straight.train("proof.rehearse=off", "retention.keep_last=99").returncode == 0
    ids = {commit.step: commit.checkpoint_sha256 for commit in straight.journal.walk_back(straight.journal.newest())}
    program = Program(nursery, tmp_path / "stopped", *made, command="tests.support.stopped:train")
    settings, struck = (*REHEARSED, f"proof.beside={str(way == 'beside').lower()}"), program.folder / "struck"
    stopped = program.train(*settings, **{STOP: f"SIGTERM:{step}:{struck}"})
    assert struck.exists(), stopped.stderr
    done = program.train(*settings)
    assert judge(done) == "death", stopped.stderr + done.stderr
    assert f"first in step {ACTS_AFTER + 1}: " in done.stderr
    commits = [*program.journal.walk_back(program.journal.newest())]
    assert max(commit.step for commit in commits) <= ACTS_AFTER
    assert {commit.checkpoint_sha256 for commit in commits if commit.step in ids} <= {*ids.values()}


def test_a_stop_saves_after_a_rehearsal_that_was_lost(nursery: Lives, tmp_path: Path) -> None:
    made = ("support.forgetting:exact", {}, 4)
    program = Program(nursery, tmp_path / "stopped", *made, command="tests.support.stopped:train")
    settings, struck = (*REHEARSED, "proof.beside=false"), tmp_path / "struck"
    killed = fault("rehearsal-restored", 1, "other", tmp_path / "killed")
    stopped = program.train(*settings, **killed, **{STOP: f"SIGTERM:28:{struck}"})
    assert struck.exists(), stopped.stderr
    assert (tmp_path / "killed").exists(), stopped.stderr
    assert program.find_step() >= 28, stopped.stderr
    assert program.finish(find_straight(nursery, tmp_path / "straight", program), *settings).by == "same"
