"""Limits complain of a number that is outside, jumps or is not finite."""

import math

import pytest

from holdfast import Limits
from holdfast.errors import ConfigError
from holdfast.recipe.probe import Probe, check_health


@pytest.mark.parametrize(
    ("limits", "value", "before", "said"),
    [
        (Limits(min=0.5), 0.5, None, ""),
        (Limits(min=0.5), 0.25, None, "x is 0.25, below 0.5"),
        (Limits(min=0), -0.5, None, "x is -0.5, below 0"),
        (Limits(max=0.5), 0.5, None, ""),
        (Limits(max=0.5), 0.75, None, "x is 0.75, above 0.5"),
        (Limits(max=0), 0.5, None, "x is 0.5, above 0"),
        (Limits(min=0.25, max=0.5), 0.75, None, "x is 0.75, above 0.5"),
        (Limits(min=0.25, max=0.5), 0.125, None, "x is 0.125, below 0.25"),
        (Limits(jump=2), 2.0, 1.0, ""),
        (Limits(jump=2), 2.5, 1.0, "x is 2.5, more than 2 times 1"),
        (Limits(jump=2), 99.0, None, ""),  # there is no checkpoint before
        (Limits(max=3, jump=2), 2.5, 1.0, "x is 2.5, more than 2 times 1"),
        (Limits(max=3, jump=2), 4.0, 3.0, "x is 4, above 3"),
    ],
)
def test_a_limit_complains_of_what_is_outside(limits: Limits, value: float, before: float | None, said: str) -> None:
    earlier = None if before is None else Probe(values={"x": before})
    assert check_health(Probe(values={"x": value, "y": 1e9}), {"x": limits}, earlier) == ([said] if said else [])


def test_a_number_that_the_checkpoint_before_had_not_does_not_jump() -> None:
    for before in (Probe(values={"y": 1.0}), Probe(values={"x": None})):
        assert check_health(Probe(values={"x": 99.0}), {"x": Limits(jump=2)}, before) == []


@pytest.mark.parametrize("limits", [{}, {"x": Limits(min=0)}, {"y": Limits(max=1)}])
def test_what_is_not_finite_always_complains(limits: dict[str, Limits]) -> None:
    found = check_health(Probe(values={"y": 0.0, "x": None}), limits)
    assert found == ["x is not finite"]


def test_every_complaint_is_made() -> None:
    probe = Probe(values={"a": None, "b": 3.0, "c": -3.0})
    assert check_health(probe, {"c": Limits(min=-1), "b": Limits(max=1), "a": Limits(max=1)}) == [
        "a is not finite", "c is -3, below -1", "b is 3, above 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"), [({}, "set min, max or jump"), ({"min": 2, "max": 1}, "min = 2 is above max = 1")]
)
def test_limits_that_limit_nothing_or_cannot_be_met_are_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Limits(**fields)


def test_a_jump_of_what_is_not_above_zero_is_none() -> None:
    assert check_health(Probe(values={"x": -1.0}), {"x": Limits(jump=2)}, Probe(values={"x": -1.0})) == []


def test_limits_are_finite() -> None:
    with pytest.raises(ConfigError, match="finite"):
        Limits(min=math.nan)
