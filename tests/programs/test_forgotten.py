"""Programs that forget or change state, rehearsed and killed: none ends on different bytes with exit code 0."""

from pathlib import Path

import pytest

from tests.conftest import IS_SOAK, ROOT
from tests.programs.ways import EARLY, LATE, WAYS, Way, make_table
from tests.support.lives import Lives
from tests.support.rehearsed import REHEARSED, Outcome, Program, find_straight

pytestmark = pytest.mark.slow

# Of all rows, those that each run of the suite tries; make soak tries all.
TRIED = WAYS if IS_SOAK else WAYS[::12]


def make_program(nursery: Lives, folder: Path, way: Way, after: int) -> Program:
    """Return a program whose state acts after some steps, in a run of some epochs beyond."""
    recipe = f"programs.forgotten.{way.program}"
    return Program(nursery, folder, recipe, {"settings.after": after}, epochs=4 if after == EARLY else 6)


def finish(program: Program, expected: str) -> Outcome:
    """Train a program to its end, with a rehearsal at each commit; compare it with a straight run if it has one."""
    straight = ""
    if expected == "the same bytes":
        straight = find_straight(program.nursery, program.folder / "straight", program)
    return program.finish(straight, *REHEARSED)


@pytest.mark.parametrize("after", [EARLY, LATE])
@pytest.mark.parametrize("way", TRIED, ids=lambda way: way.program)
def test_it_is_stopped_by_its_first_rehearsal_or_ends_on_the_same_bytes(
    nursery: Lives, tmp_path: Path, way: Way, after: int
) -> None:
    """A run that is stopped stays so: it is killed or started again, and commits nothing."""
    expected = way.early if after == EARLY else way.late
    program = make_program(nursery, tmp_path, way, after)
    if expected == "the same bytes":
        assert program.kill_at(2 if after == EARLY else 4, *REHEARSED)
    outcome = finish(program, expected)
    assert str(outcome) == expected, outcome.said
    if outcome.by in ("rehearsal", "gate"):
        again = program.finish("", *REHEARSED)
        assert again.by in ("death", "gate"), again.said
        assert again.step == outcome.step


@pytest.mark.parametrize("way", TRIED, ids=lambda way: way.program)
def test_killed_before_its_state_acts_it_is_stopped_later(nursery: Lives, tmp_path: Path, way: Way) -> None:
    """No rehearsal has seen the state act; the first one does after it acts in the processes that went on."""
    program = make_program(nursery, tmp_path, way, LATE)
    # The ranks die as they complete that checkpoint. On a slow machine they may have the next one before the commit.
    assert program.kill_at(1, point="metadata-durable") or way.unseen == "refused"
    outcome = finish(program, way.unseen)
    assert str(outcome) == way.unseen, outcome.said


def test_the_file_has_the_table() -> None:
    assert (ROOT / "docs" / "data" / "forgotten.csv").read_text("utf-8") == make_table()


def test_the_table_has_recipes_and_loops_of_many_kinds() -> None:
    kinds = [way.kind for way in WAYS]
    assert len(WAYS) >= 40
    assert min(kinds.count("recipe"), kinds.count("loop")) >= 30
    assert len({way.does for way in WAYS}) == len(WAYS)
