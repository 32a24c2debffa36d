"""Programs in the shapes of tutorials, stopped at a commit and off it: no refusal, no warning, the same bytes."""

from pathlib import Path

import pytest

from holdfast.testing.faults import fault
from tests.conftest import IS_SOAK
from tests.programs.trials import COMMAND, list_warnings
from tests.support.lives import Lives
from tests.support.rehearsed import PROGRAMS, REHEARSED, Program, find_straight, list_functions
from tests.support.stopped import STOP

EPOCHS = 4
NEEDS = {"scripts:writes_to_tensorboard": "tensorboard"}
TUTORIALS = [
    f"{file.stem}:{name}"
    for file in sorted((PROGRAMS / "tutorials").glob("*.py"))
    for name, _, _ in list_functions(file)
]
# Each of these has something of its own: the best weights and a phase after each epoch; a hidden state; a second
# loader; another mode of the optimizer for validation.
TRAINED = (
    "pictures:transfers", "sequences:carries_hidden_states", "representations:fixmatch",
    "practice:needs_no_schedule",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extras(NEEDS[name]) if name in NEEDS else ())
        for name in (TUTORIALS if IS_SOAK else TRAINED)
    ],
)
def test_stopped_three_times_it_ends_on_the_same_bytes(nursery: Lives, tmp_path: Path, name: str) -> None:
    """It gets SIGTERM inside an epoch, and SIGKILL at the commit of an epoch's end and inside an epoch."""
    recipe = f"programs.tutorials.{name}"
    program = Program(nursery, tmp_path / "stopped", recipe, {}, EPOCHS, command=COMMAND)
    straight = find_straight(nursery, tmp_path / "straight", program)
    per_epoch = 4 if name == "practice:fits_by_lbfgs" else 10
    stops = [
        {STOP: f"SIGTERM:{per_epoch + 3}:{tmp_path}/first"},
        fault("commit-recorded", 1, "both", tmp_path / "second"),
        {STOP: f"SIGKILL:{3 * per_epoch - 3}:{tmp_path}/third"},
    ]
    said = []
    for variables in stops:
        done = program.train(*REHEARSED, **variables)
        assert done.returncode in (143, -9), done.stderr
        said.append(done.stderr)
    done = program.train(*REHEARSED)
    assert done.returncode == 0, done.stderr
    assert list_warnings([*said, done.stderr]) == []
    assert program.find_content() == straight


def test_there_are_many_programs() -> None:
    assert len(TUTORIALS) >= 140
    assert {*TRAINED, *NEEDS} <= {*TUTORIALS}
