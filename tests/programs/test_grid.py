"""The grid: no run ends on different bytes in silence, and no program that keeps its state is refused."""

import random

import pytest

from tests.conftest import IS_SOAK
from tests.programs.grid import CASES, HOWS, PERIODS, STATES, Case
from tests.programs.shapes import SHAPES
from tests.programs.trials import Trials
from tests.support.lives import Lives

# A case of each shape, drawn among its periods, states, lengths, stops and steps; make soak tries all cases.
DRAWN = [random.Random(shape).choice([case for case in CASES if case.shape == shape]) for shape in SHAPES]
TRIED = CASES if IS_SOAK else DRAWN


@pytest.fixture(scope="module")
def trials(nursery: Lives, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(nursery, tmp_path_factory.mktemp("grid"))


@pytest.mark.slow
@pytest.mark.parametrize("case", TRIED, ids=str)
def test_it_ends_on_the_same_bytes_or_is_stopped_if_it_forgets(trials: Trials, case: Case) -> None:
    result = trials.attempt(case)
    is_told = any("no checkpoint contains it" in warning for warning in result.warnings)
    assert result.end in ("same", "stopped") or is_told, f"{result.end}\n{result.said}\n{result.shown}"
    if case.state == "kept":
        assert result.end == "same", result.said
        assert result.warnings == []


def test_the_grid_has_two_thousand_cases_of_all_kinds() -> None:
    assert len({str(case) for case in CASES}) == len(CASES) >= 2000
    assert {case.shape for case in CASES} == {*SHAPES}
    assert {case.period for case in CASES} == {0, *PERIODS}
    assert {(case.state, case.how) for case in CASES} == {(state, how) for state in STATES for how in HOWS}
