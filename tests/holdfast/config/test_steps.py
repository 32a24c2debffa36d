"""A set of steps is read, joined, cut and written as sets of numbers are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from holdfast.config import RunConfig
from holdfast.config.steps import Steps

MOST = 30
SETS = st.sets(st.integers(1, MOST))


def make(numbers: set[int]) -> Steps:
    return Steps.of((number, number) for number in numbers)


def read(steps: Steps) -> set[int]:
    return {number for number in range(1, MOST + 1) if number in steps}


@given(SETS, SETS)
def test_the_operations_are_those_of_sets(one: set[int], other: set[int]) -> None:
    first, second = make(one), make(other)
    assert read(first) == one
    assert Steps.parse(str(first)) == first
    assert read(first | second) == one | other
    assert read(first - second) == one - other
    assert read(first ^ second) == one ^ other
    assert (first.first, first.last) == ((min(one), max(one)) if one else (0, 0))
    for step in range(MOST + 1):
        assert first.find_outside(step) == max(({0, *range(step + 1)} - one), default=0)


@pytest.mark.parametrize(
    ("text", "spelled"),
    [("5", "5"), (" 7 - 9 , 5,6", "5-9"), ("3-4,4-8", "3-8"), ("", ""), ("10,1-2", "1-2,10")],
)
def test_a_text_is_read(text: str, spelled: str) -> None:
    assert str(Steps.parse(text)) == spelled
    assert RunConfig(recipe="a:b", run="r", skip=text).skip == spelled


@pytest.mark.parametrize("text", ["0", "5-3", "-5", "5-", "a", "1,,2", "1;2", str(2**53 + 1), "1.5"])
def test_a_text_that_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="expected steps such as 1200-1210"):
        RunConfig(recipe="a:b", run="r", skip=text)


def test_a_number_is_a_step_and_other_values_are_none() -> None:
    assert RunConfig.model_validate({"recipe": "a:b", "run": "r", "skip": 5}).skip == "5"
    with pytest.raises(ValidationError, match="expected steps"):
        RunConfig.model_validate({"recipe": "a:b", "run": "r", "skip": True})


def test_only_a_run_that_skips_steps_has_them_in_its_identity() -> None:
    config = RunConfig(recipe="a:b", run="r")
    assert "skip" not in config.identity
    assert config.with_skip("") is config
    skipping = config.with_skip("3-4").with_skip("9")
    assert skipping.identity == config.identity | {"skip": "3-4,9"}
