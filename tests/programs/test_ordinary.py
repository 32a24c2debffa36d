"""Ordinary programs, rehearsed at each of their first commits: no warning, no refusal, the same bytes."""

import itertools
import shutil
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK
from tests.programs.kinds import KINDS, REHEARSALS, Kind
from tests.support.lives import Lives
from tests.support.rehearsed import REHEARSED, Program, find_straight

# Of all programs, those that each run of the suite trains; make soak trains all.
TRAINED = KINDS if IS_SOAK else list(dict.fromkeys([*KINDS[::12], *(kind for kind in KINDS if kind.needs)]))
SHORT_EPOCHS = 3  # of each, outside of make soak
HAS_COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.extras(kind.needs) if kind.needs else (), id=str(kind)) for kind in TRAINED],
)
def test_rehearsals_change_no_byte_and_say_nothing(nursery: Lives, tmp_path: Path, kind: Kind) -> None:
    if "compiles" in kind.recipe and not HAS_COMPILER:
        pytest.skip("torch.compile needs a compiler")
    for module in kind.late:
        nursery.load(module)
    epochs = kind.epochs if IS_SOAK or kind.needs else min(kind.epochs, SHORT_EPOCHS)  # a Trainer has its own
    program = Program(nursery, tmp_path / "rehearsed", kind.recipe, dict(kind.settings), epochs, kind.chunk)
    done = program.train(*REHEARSED)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith("warning")], done.stderr
    commits = [program.journal.read_commit(number) for number in program.journal.numbers("commits")]
    rehearsed = [each for commit in commits for each in commit.rehearsals]
    for before, after in itertools.pairwise(commits[: REHEARSALS + 1]):  # some steps of each chunk after the first
        assert any(each.start < after.step and each.stop > before.step for each in rehearsed), done.stderr
    assert program.find_content() == find_straight(nursery, tmp_path / "straight", program)


def test_there_are_at_least_eighty_programs() -> None:
    assert len(KINDS) >= 80
    assert len({str(kind) for kind in KINDS}) == len(KINDS)
